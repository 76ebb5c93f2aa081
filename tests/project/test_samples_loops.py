"""The samples with loops of their own: each runs and prints the numbers of its document."""

import sys

from sample_process import SAMPLES, processes_in, run_sample
from sample_program import run_program

sys.path.append(str(SAMPLES / "resnet18"))


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
