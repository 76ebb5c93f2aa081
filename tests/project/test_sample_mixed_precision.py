"""The sample that trains a Vision Transformer in float32 and in float16."""

import json
import subprocess
import sys

import pytest
from refusal import refuses
from sample_process import SAMPLES, SUBSET
from sample_program import run_program

sys.path.append(str(SAMPLES / "mixed_precision"))
import compare

from ms_gradaccum.tools.reporting.run_plot import read_run

# Of losses about 2.3 after 4 updates: float16 has 11 bits.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The reports of 4 updates of two batches of 16 images in both precisions, by the name of the precision."""
    folder = tmp_path_factory.mktemp("mixed_precision")
    small = ["--rows", "128", "--epochs", "1", "--layers", "1", "--batch-size", "16", "--accumulation-steps", "2"]
    for precision in ("fp32", "fp16"):
        arguments = ["--precision", precision, "--warmup", "2", "--metrics", f"{precision}.jsonl", *small]
        printed = run_program("mixed_precision", *arguments, folder=folder, DATA_PATH=str(SUBSET))
        assert printed[0] == f"Training in {precision} on the data in DATA_PATH={SUBSET}."
        assert any(": 8/8 " in line and ", 4 updates, " in line for line in printed)
    return {precision: folder / f"{precision}.jsonl" for precision in ("fp32", "fp16")}


def test_the_losses_in_float16_are_those_in_float32(runs):
    full, half = ([report["loss"] for report in read_run(file)] for file in runs.values())
    assert len(full) == len(half) == 4
    assert half == pytest.approx(full, abs=TOLERANCE) and half != full
    assert full[-1] < full[0]  # otherwise it trains nothing


def test_the_reports_have_the_scale_and_a_rate_per_update(runs):
    for precision, scale in (("fp32", 1.0), ("fp16", 65536.0)):
        reports = read_run(runs[precision])
        assert [report["loss_scale"] for report in reports] == [scale] * 4
        assert [report["batches"] for report in reports] == [2, 4, 6, 8]
        # Two updates up to the peak, then from it half a cosine down.
        assert [report["learning_rate"] for report in reports] == pytest.approx([1e-3, 2e-3, 2e-3, 1e-3])
        assert all(report["clipped_grad_norm"] <= 1.0 + 1e-6 for report in reports)


def test_the_accuracies_are_compared_and_drawn(runs, tmp_path):
    program = [sys.executable, SAMPLES / "mixed_precision" / "compare.py"]
    result = subprocess.run([*program, runs["fp32"].parent, tmp_path / "plot.png"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fp32: 4 updates, 0 skipped, loss scale 1, last loss ")
    assert lines[1].startswith("fp16: 4 updates, 0 skipped, loss scale 65536, last loss ")
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


def write_run(file, accuracy, scales):
    reports = [
        {"update": i + 1, "loss": 1.0, "loss_scale": scale, "skipped_updates": i} for i, scale in enumerate(scales)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*reports, {"eval_accuracy": accuracy}]))
    return file


def test_a_run_that_loses_more_than_the_margin_is_an_error(tmp_path, capsys):
    full = write_run(tmp_path / "fp32.jsonl", 0.82, [1.0, 1.0])
    compare.compare(full, write_run(tmp_path / "fp16.jsonl", 0.80, [65536.0, 32768.0]))
    assert capsys.readouterr().out.splitlines() == [
        "fp32: 2 updates, 1 skipped, loss scale 1, last loss 1.0000, 82.0% of the test images right",
        "fp16: 2 updates, 1 skipped, loss scale 65536, 32768, last loss 1.0000, 80.0% of the test images right",
        "losses differ by at most 0.0e+00",
        "The accuracy of fp16 is within 2% of the test images of that of fp32, or better.",
    ]
    worse = write_run(tmp_path / "worse.jsonl", 0.79, [65536.0])
    with pytest.raises(AssertionError, match="worse gets 3.0% less of the test images right, more than 2%"):
        compare.compare(full, worse)


def test_a_wrong_precision_is_an_error_that_names_the_right_ones(tmp_path):
    with refuses(ValueError, "'mixed_precision'", "'fp64'"):
        run_program("mixed_precision", "--precision", "fp64", "--rows", "16", folder=tmp_path, DATA_PATH=str(SUBSET))
