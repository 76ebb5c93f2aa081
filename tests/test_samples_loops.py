"""The samples with loops of their own: each runs and prints the numbers of its document."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sample_process import SAMPLES, processes_in, run_sample  # noqa: E402

for name in ("resnet18", "transformer_lm"):
    sys.path.append(str(SAMPLES / name))
import images  # noqa: E402
import plot  # noqa: E402


def run_program(name, *arguments, folder, **variables):
    """Run a sample's train.py in one process and return the lines that it prints."""
    command = [sys.executable, str(SAMPLES / name / "train.py"), *arguments]
    environment = {**os.environ, **variables}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


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


def test_resnet18_takes_cifar10(tmp_path):
    """A file has 10,000 images in its binary version: a label, then 1,024 bytes of red, of green and of blue."""
    row = np.repeat(np.array([7, 0, 128, 255], np.uint8), [1, 1024, 1024, 1024])
    (tmp_path / "data_batch_1.bin").write_bytes(np.tile(row, 10000).tobytes())
    dataset = images.create_dataset(4, tmp_path)
    assert dataset.get_dataset_size() == 2500
    ((image, label),) = dataset.take(1).create_tuple_iterator(output_numpy=True)
    assert (image.shape, image.dtype, label.dtype) == ((4, 3, 32, 32), np.float32, np.int32)
    assert label.tolist() == [7] * 4
    # The middle is never cropped.
    assert np.allclose(image[:, :, 16, 16], [-2.4291, 0.0990, 2.7537], atol=1e-3)


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
    updates = runs["1x2x16"]
    assert [update["update"] for update in updates] == [1, 2, 3]
    assert updates[2]["weight"] < 77 < updates[1]["weight"]  # one line, 32 lines
    assert printed == [f"epoch 1, update 3: loss {updates[2]['loss']:.4f}"]


def runs_of(**losses):
    weights = {"weight": 10.0}
    return {
        name.replace("_", " "): [{"update": i + 1, "loss": loss, **weights} for i, loss in enumerate(values)]
        for name, values in losses.items()
    }


def test_the_check_of_the_losses_tells_equal_from_unequal(capsys):
    plot.check_runs(runs_of(a=[3.0, 2.0], b=[3.0, 2.000005], mean_of_means=[3.0, 2.1]))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "b against a: 2 updates, losses differ by at most 5.0e-06"
    assert printed[1] == "mean of means against a: 2 updates, losses differ by at most 1.0e-01"
    with pytest.raises(AssertionError, match="b is not the training of a"):
        plot.check_runs(runs_of(a=[3.0, 2.0], b=[3.0, 2.0001]))
    with pytest.raises(AssertionError, match="other lines in an update"):
        plot.check_runs(runs_of(a=[3.0, 2.0], b=[3.0]))


def test_the_plot_is_drawn(tmp_path):
    plot.draw_runs(runs_of(a=[3.0, 2.0], b=[3.0, 2.0], mean_of_means=[3.0, 2.1]), tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes()[1:4] == b"PNG"


def test_the_text_is_as_its_readme_says():
    folder = SAMPLES / "data" / "as_you_like_it"
    digest = hashlib.sha256((folder / "as_you_like_it.txt").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text()
