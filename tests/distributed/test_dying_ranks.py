"""A rank that ends with an error is named in the logs of the others."""

from pathlib import Path

from launch import launch


def test_the_logs_of_the_other_ranks_name_the_one_that_has_ended(tmp_path):
    other, own = (Path(log) for log in launch(Path(__file__).parent / "dying_worker.py", 2, tmp_path))
    sentence = f"rank 1 has ended with RuntimeError: the label 'cat' is not known See the end of {own};"
    told, later = (text := other.read_text(errors="replace")).find(sentence), text.find("later " * 500)
    assert 0 <= told < later and text.count(sentence) == 1
    assert "Traceback" in (text := own.read_text(errors="replace")) and sentence not in text


def test_a_rank_that_alone_saves_is_told_that_the_others_do_not(tmp_path):
    said, _ = launch(Path(__file__).parent / "lonely_worker.py", 2, tmp_path)
    assert "this rank saves a state and another one adds up gradients" in said
