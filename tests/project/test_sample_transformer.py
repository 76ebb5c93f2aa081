"""The sample that trains a transformer on a real text, in several cuts of the same windows."""

import hashlib
import sys

import pytest
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
    plot.draw_runs(runs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[1:4] == b"PNG"
    (updates,) = runs["1x2x16"]
    assert [update["update"] for update in updates] == [1, 2, 3]
    assert updates[2]["weight"] < 77 < updates[1]["weight"]  # one line, 32 lines
    assert printed == [f"epoch 1, update 3: loss {updates[2]['loss']:.4f}"]
    # Otherwise the comparison would prove nothing.
    updates[2]["loss"] += 0.1
    with pytest.raises(AssertionError, match="is not the training of"):
        plot.check_runs(runs)


def test_the_text_is_as_its_readme_says():
    folder = SAMPLES / "data" / "as_you_like_it"
    digest = hashlib.sha256((folder / "as_you_like_it.txt").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
