"""The programs that train in other projects' trainers notice what differs. They themselves run in ./run.sh clients."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CLIENTS = Path(__file__).parents[2] / "clients"


def program(name):
    spec = importlib.util.spec_from_file_location(f"clients_{name}", CLIENTS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


comparison, run = program("comparison"), program("run")


class Step:
    def __init__(self):
        self.calls = 0
        self.optimizer = self
        self.parameters = [self]

    def __call__(self, *inputs):
        self.calls += 1

    def asnumpy(self):
        return np.zeros(1)


def way(end, calls=1, reports=(), start=0.0):
    weights = [np.array([3.0, start])], [np.array([3.0, end])]
    return comparison.Way(lambda: weights, Step, calls, reports)


def compare(*ways, wrong=""):
    candidates = [comparison.Candidate(str(i), lambda each=each: each, wrong) for i, each in enumerate(ways)]
    whole = comparison.Candidate("whole", lambda: way(4.0, reports=[[1.0, 2.0]]))
    return comparison.compare("case", [whole, *candidates], [np.zeros((4, 1), np.float32)], 2)[1:]


@pytest.mark.parametrize(
    ("end", "wrong", "fails"),
    [(4.000004, "", False), (4.000006, "", True), (4.1, "other", False), (4.00004, "other", True)],
)
def test_a_way_that_ends_elsewhere_fails_and_one_that_is_known_to_be_wrong_must(end, wrong, fails):
    (row,) = compare(way(end), wrong=wrong)
    assert row["difference"] == pytest.approx((end - 4) / 5)  # the norm of (3, 4)
    assert row["of_movement"] == pytest.approx((end - 4) / 4)
    assert row["fails"] == fails


def test_reports_are_compared_and_every_call_of_an_update_is_timed():
    same, other = compare(way(4.0, 2, [[1.0, 2.0]]), way(4.0, 1, [[1.0, 2.1]]))
    assert (same["reports"], same["fails"]) == (0.0, False)
    assert (other["reports"], other["fails"]) == (pytest.approx(0.05), True)
    assert len(same["seconds"]) == 2


def test_ways_start_with_the_same_weights():
    with pytest.raises(RuntimeError, match="case, 0: the weights at the start are others"):
        compare(way(4.0, start=1.0))


def test_the_runner_fails_where_a_program_does(tmp_path, monkeypatch, capsys):
    file = tmp_path / "program.py"
    row = {"case": "case", "way": "ours", "wrong": "", "difference": 0.0, "of_movement": 0.0, "seconds": [1.0]}
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "PROGRAMS", {"numpy": "program.py"})
    monkeypatch.setattr(sys, "argv", ["run.py"])
    for fails in (False, True):
        rows = json.dumps([row | {"fails": fails}])
        file.write_text(f"import sys\nopen(sys.argv[1], 'w').write({rows!r})\n")
        assert run.main() == fails
        assert ("FAILS" in capsys.readouterr().out) == fails
    file.write_text("raise SystemExit('why')\n")
    assert run.main() == 1
    assert "numpy ended with status 1:\nwhy\n" in capsys.readouterr().out


def test_the_list_of_programs_is_what_the_help_names():
    said = subprocess.run([sys.executable, CLIENTS / "run.py", "--help"], capture_output=True, text=True, check=True)
    assert "{mindformers,mindcv,mindone,mindocr,mindyolo,models}" in said.stdout
    # HyperParallel is no package: its program takes the folder of its source.
    assert {file.name for file in CLIENTS.glob("*_*.py")} - {"hyper_parallel_ranks.py"} == set(run.PROGRAMS.values())
