"""A rank that ends with an error is named in the logs of the others."""

from pathlib import Path

import pytest
from launch import launch


def test_the_logs_of_the_other_ranks_name_the_one_that_has_ended(tmp_path):
    with pytest.raises(RuntimeError, match="reported nothing"):
        launch(Path(__file__).parent / "dying_worker.py", 2, tmp_path, limit=15)
    folder = tmp_path / "log"
    logs = [(folder / f"worker_{rank}.log").read_text(errors="replace") for rank in range(2)]
    sentence = (
        "For 'TrainOneStepCell', all ranks must train to the end, but rank 1 has ended with KeyError: \"the label 'cat' "
        f'is not known" Look at the end of {folder}/worker_1.log; what follows here is of the lost connection.'
    )
    assert logs[0].count(sentence) == 1 and "Traceback" in logs[1] and sentence not in logs[1]
