"""Reports of several processes: what is measured changes nothing, and one rank writes."""

import json

import numpy as np
import pytest

PART, SIZES = "report_worker", (2,)
KINDS = ["data parallel", "each batch", "level1, compiled"]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_measured_changes_no_bit(name, two):
    for report in two:
        assert report[name]["observed"] == report[name]["plain"]
    assert two[0][name]["observed"][0] == two[1][name]["observed"][0]


@pytest.mark.parametrize("name", KINDS)
def test_rank_0_writes_each_update_also_those_that_another_rank_ends(name, two, root):
    lines = [json.loads(line) for line in (root / "of2" / PART / f"{name}.jsonl").read_text().splitlines()]
    # Of three batches on rank 0 and two on rank 1 the third is a window of its own.
    assert [line["update"] for line in lines] == [1, 2]
    assert [report[name]["updates"] for report in two] == [[1, 2]] * 2
    np.testing.assert_allclose(lines[-1]["weight_norm"], two[0][name]["norm"], 1e-6)


def test_rank_0_alone_shows_progress(two):
    for name in KINDS:
        assert "2 updates" in two[0][name]["printed"] and two[1][name]["printed"] == ""
