"""A rank that ends with an error is named in the logs of the others, and one that saves alone is told so."""

from pathlib import Path

import pytest
from launch import launch


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return launch(Path(__file__).parent / "dying_worker.py", 2, tmp_path_factory.mktemp("dying"))


def test_the_logs_of_the_other_ranks_name_the_one_that_has_ended(reports):
    other, own = (Path(log) for log, _ in reports)
    text = other.read_text(errors="replace")
    sentence = f"rank 1 has ended with RuntimeError: the label 'cat' is not known See the end of {own};"
    assert 0 <= text.find(sentence) < text.find("later " * 500) and text.count(sentence) == 1
    text = own.read_text(errors="replace")
    assert "Traceback" in text and sentence not in text


def test_a_rank_that_alone_saves_is_told_that_the_others_do_not(reports):
    (_, said), _ = reports
    assert "this rank saves a state and another one adds up gradients" in said
