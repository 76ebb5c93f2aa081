"""The samples that are one program: each runs and prints the numbers of its document."""

import re
import subprocess
import sys

import pytest
from sample_process import SAMPLES, SUBSET, processes_in, run_sample
from sample_program import run_program

from ms_gradaccum.tools.reporting.run_plot import read_run

sys.path.append(str(SAMPLES / "transformer_lm"))
import plot  # noqa: E402


def test_the_linear_toy_has_one_weight_with_and_without_accumulation(tmp_path):
    lines = run_program("linear_toy", folder=tmp_path)
    assert [line.rpartition(" ")[2] for line in lines if line.startswith("batch")] == ["0.00000"] * 3 + ["2.04000"]
    assert lines[-2:] == [
        "with accumulation, the final weight is 2.04000",
        "without accumulation, the final weight is 2.04000",
    ]


def test_the_causal_lm_in_one_process(tmp_path):
    assert run_program("causal_lm", folder=tmp_path) == [
        "initial weight: [-0.0075, 0.5364]",
        "rank 0, batches dealt round-robin: 36 of 36 tokens, final weight [0.0953, 0.4337]",
        "rank 0, samples dealt round-robin: 36 of 36 tokens, final weight [0.0953, 0.4337]",
        "without accumulation, the final weight is [0.0953, 0.4337]",
    ]


def test_the_causal_lm_in_two_processes(tmp_path):
    result = run_sample(tmp_path, script=SAMPLES / "causal_lm" / "run.sh")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [
        "rank 0, batches dealt round-robin: 52 of 136 tokens, final weight [0.2117, 0.3172]",
        "rank 0, samples dealt round-robin: 64 of 136 tokens, final weight [0.2117, 0.3172]",
        "without accumulation, the final weight is [0.2117, 0.3172]",
        "rank 1, batches dealt round-robin: 84 of 136 tokens, final weight [0.2117, 0.3172]",
        "rank 1, samples dealt round-robin: 72 of 136 tokens, final weight [0.2117, 0.3172]",
        "without accumulation, the final weight is [0.2117, 0.3172]",
    ]
    assert processes_in(tmp_path) == {}


def test_resnet18_is_only_updated_in_the_last_iteration(tmp_path):
    lines = run_program("resnet18", folder=tmp_path, BATCH_SIZE="4")
    parameters = [line.partition("param: ")[2] for line in lines if "param: " in line]
    moving_means = [line.partition("mean: ")[2] for line in lines if "mean: " in line]
    assert len(parameters) == len(moving_means) == 4
    assert parameters[0] == parameters[1] == parameters[2] != parameters[3]
    assert len(set(moving_means)) == 4
    assert lines[-1] == "The parameter is only updated in the last iteration"


def test_cached_micro_batches_train_like_the_whole_batch_and_plain_ones_do_not(tmp_path):
    small = ["--rows", "256", "--epochs", "2", "--batch-size", "64", "--micro-size", "16"]
    lines = run_program("contrastive", *small, folder=tmp_path, DATA_PATH=str(SUBSET))
    shown = {line.partition(":")[0]: re.findall(r"[\d.]+%", line) for line in lines if line.endswith("find their name")}
    assert list(shown) == ["whole batch", "cached micro batches", "plain micro batches"]
    assert all(len(accuracies) == 2 for accuracies in shown.values())
    assert shown["cached micro batches"] == shown["whole batch"] != shown["plain micro batches"]
    assert (tmp_path / "contrastive.png").read_bytes()[:4] == b"\x89PNG"


# Of losses about 2.3 after 4 updates: float16 has 11 bits.
TOLERANCE = 2e-3


def test_the_losses_in_float16_are_those_in_float32_and_are_compared_and_drawn(tmp_path):
    """The reports of 4 updates of two batches of 16 images in both precisions."""
    small = ["--rows", "128", "--epochs", "1", "--layers", "1", "--batch-size", "16", "--accumulation-steps", "2"]
    for precision in ("fp32", "fp16"):
        arguments = ["--precision", precision, "--warmup", "2", "--metrics", f"{precision}.jsonl", *small]
        printed = run_program("mixed_precision", *arguments, folder=tmp_path, DATA_PATH=str(SUBSET))
        assert printed[0] == f"Training in {precision} on the data in DATA_PATH={SUBSET}."
        assert any(": 8/8 " in line and ", 4 updates, " in line for line in printed)
    full, half = ([each["loss"] for each in read_run(tmp_path / f"{name}.jsonl")] for name in ("fp32", "fp16"))
    assert len(full) == len(half) == 4
    assert half == pytest.approx(full, abs=TOLERANCE) and half != full
    assert full[-1] < full[0]  # otherwise it trains nothing
    program = [sys.executable, SAMPLES / "mixed_precision" / "compare.py"]
    result = subprocess.run([*program, tmp_path, tmp_path / "plot.png"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fp32: 4 updates, 0 skipped, loss scale 1, last loss ")
    assert lines[1].startswith("fp16: 4 updates, 0 skipped, loss scale 65536, last loss ")
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


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
