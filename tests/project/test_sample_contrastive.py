"""The sample of contrastive learning: it prints three trainings beside each other, and draws them."""

import re

import pytest
from sample_process import SUBSET
from sample_program import run_program


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrastive")
    small = ["--rows", "256", "--epochs", "2", "--batch-size", "64", "--micro-size", "16"]
    return folder, run_program("contrastive", *small, folder=folder, DATA_PATH=str(SUBSET))


def test_cached_micro_batches_train_like_the_whole_batch_and_plain_ones_do_not(printed):
    folder, lines = printed
    shown = {line.partition(":")[0]: re.findall(r"[\d.]+%", line) for line in lines if line.endswith("find their name")}
    assert list(shown) == ["whole batch", "cached micro batches", "plain micro batches"]
    assert all(len(accuracies) == 2 for accuracies in shown.values())
    assert shown["cached micro batches"] == shown["whole batch"] != shown["plain micro batches"]
    assert (folder / "contrastive.png").read_bytes()[:4] == b"\x89PNG"
