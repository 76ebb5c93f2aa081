"""The sample that trains a transformer on a real text, in several cuts of the same windows."""

import hashlib
import json
import sys

import pytest
from matplotlib.figure import Figure
from sample_process import SAMPLES, run_sample
from sample_program import run_program

sys.path.append(str(SAMPLES / "transformer_lm"))
import plot


def test_the_transformer_has_the_same_losses_however_a_window_is_cut(tmp_path):
    """65 lines: windows of 32, 32 and 1, so that the second process has nothing in the last one."""
    program = str(SAMPLES / "transformer_lm" / "train.py")
    small = ["--lines", "65", "--epochs", "1", "--layers", "1", "--batch-size", "16", "--accumulation-steps"]
    printed = run_program("transformer_lm", *small, "2", "--losses", "1x2x16.jsonl", folder=tmp_path)
    result = run_sample(tmp_path, arguments=[program, *small, "1", "--losses", "2x1x16.jsonl"])
    assert result.returncode == 0, result.stdout + result.stderr

    runs = plot.read_runs(tmp_path)
    assert list(runs) == ["1x2x16", "2x1x16"]
    plot.check_runs(runs)
    (updates,) = runs["1x2x16"]
    assert [update["update"] for update in updates] == [1, 2, 3]
    assert updates[2]["weight"] < 77 < updates[1]["weight"]  # one line, 32 lines
    assert printed == [f"epoch 1, update 3: loss {updates[2]['loss']:.4f}"]


def runs_of(**losses):
    weights = {"weight": 10.0}
    return {
        name.replace("_", " "): [
            [{"update": i + 1, "loss": loss, **weights} for i, loss in enumerate(values)] for values in seeds
        ]
        for name, seeds in losses.items()
    }


def test_the_check_of_the_losses_tells_equal_from_unequal(capsys):
    plot.check_runs(
        runs_of(a=[[3.0, 2.0]] * 2, b=[[3.0, 2.0], [3.0, 2.000005]], mean_of_means=[[3.0, 2.1], [3.0, 2.0]])
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "b against a: 2 updates, losses differ by at most 5.0e-06"
    assert printed[1] == "mean of means against a: 2 updates, losses differ by at most 1.0e-01"
    with pytest.raises(AssertionError, match="b is not the training of a"):
        plot.check_runs(runs_of(a=[[3.0, 2.0]] * 2, b=[[3.0, 2.0], [3.0, 2.0001]]))
    with pytest.raises(AssertionError, match="other lines in an update"):
        plot.check_runs(runs_of(a=[[3.0, 2.0]], b=[[3.0]]))


def test_the_runs_of_several_seeds_are_found_by_name(tmp_path):
    for seed, loss in ((1, 3.0), (2, 2.0)):
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}" / "1x2x16.jsonl").write_text(json.dumps({"loss": loss}))
    assert plot.read_runs(tmp_path) == {"1x2x16": [[{"loss": 3.0}], [{"loss": 2.0}]]}


def test_the_plot_has_a_band_of_the_seeds(tmp_path):
    axes = Figure().subplots()
    line = plot.draw_band(axes, [[3.0, 2.0], [5.0, 1.0], [4.0, 1.5]], "C0")
    assert line.get_xydata().tolist() == [[1, 4.0], [2, 1.5]]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.0, 5.0)
    runs = runs_of(a=[[3.0, 2.0]], b=[[3.0, 2.0]], mean_of_means=[[3.0, 2.1]])
    plot.draw_runs(runs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[1:4] == b"PNG"


def test_the_text_is_as_its_readme_says():
    folder = SAMPLES / "data" / "as_you_like_it"
    digest = hashlib.sha256((folder / "as_you_like_it.txt").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
