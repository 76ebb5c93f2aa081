"""The sample that trains a Vision Transformer in float32 and in float16."""

import subprocess
import sys

import pytest
from sample_process import SAMPLES, SUBSET
from sample_program import run_program

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
