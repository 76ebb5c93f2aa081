"""Operators that are sharded over dp x mp devices: what the partitioned step computes, beside one whole batch."""

import pytest
from sharded_worker import VARIANTS
from simulation.cuda_stubs import why_not

PART, SIZES = "sharded_worker", (4,) if why_not() is None else ()
FOR_GPU = True
pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"cannot compile for GPU here: {why_not()}")


@pytest.fixture(params=list(VARIANTS))
def ranks(request, four):
    """Return a variant and what each rank reported of it."""
    results = [report[request.param] for report in four]
    assert "error" not in results[0], results[0]["error"]
    return VARIANTS[request.param], results


def test_weights_are_those_of_one_process_on_the_whole_batch(ranks):
    variant, results = ranks
    for result in results:
        # Adam divides gradients that are near zero, and their rounding, by their size.
        assert result["difference"] < (2e-6 if variant.adam else 2e-7)
        assert result["moved"] > 5e-3
        # The window is over: its sums are cleared.
        assert result["sums"] == 0


def test_report_is_that_of_the_whole_batch_on_all_ranks(ranks):
    variant, results = ranks
    for result in results:
        for (loss, norm, _, weight), items in zip(result["whole"], result["items"], strict=True):
            assert [items[0], items[4], items[7]] == pytest.approx([loss, norm, weight], rel=1e-6)
            assert items[5] == pytest.approx(min(norm, variant.max_norm or norm), rel=1e-6)
            assert (items[1], items[3]) == (0, 1)


def test_operators_are_sharded(ranks):
    """Else the others would compare a data parallel program."""
    variant, results = ranks
    sends = "AllReduce of forward of a sharded operator"
    if variant.llama is not None and variant.llama.sequence_parallel:
        sends = "ReduceScatter of forward of a sharded operator"
    for result in results:
        assert variant.mp == 1 or result["purposes"].get(sends, 0) >= variant.micro_size
        assert (result["parts"] > 0) == (variant.mp > 1 or variant.level is not None)
