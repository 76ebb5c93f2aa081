"""Semi-auto-parallel without a GPU: what the compiler makes of our cells, and what that computes."""

import pytest
from semi_auto_worker import COUNTS, NUMBERS, REFUSED
from simulation.cuda_stubs import why_not

PART, SIZES = "semi_auto_worker", (2, 4) if why_not() is None else ()
FOR_GPU = True
pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"cannot compile for GPU here: {why_not()}")

_OVERFLOW = "level1-2-overflow"
_HALF = "level1-2-half-full"
_NUMBERS = [(size, name) for size in NUMBERS for name in NUMBERS[size] if name not in (_OVERFLOW, _HALF)]
_COUNTS = [(size, name) for size in COUNTS for name in COUNTS[size]]
_PARAMETERS = 4


@pytest.fixture(scope="module")
def reports(two, four):
    return {2: two, 4: four}


def succeeded(result):
    """Return the result of a variant, or fail with what went wrong there."""
    assert "error" not in result, result["error"]
    return result


@pytest.mark.parametrize("size, name", _NUMBERS)
def test_weights_and_reports_are_those_of_one_process_on_the_whole_batch(reports, size, name):
    variant = NUMBERS[size][name]
    for report in reports[size]:
        result = succeeded(report["numbers"][name])
        # Adam divides gradients that are near zero, and their rounding, by their size.
        is_rounded = variant.dp and variant.optimizer == "adam"
        assert result["difference"] < (2e-6 if is_rounded else 2e-7)
        assert result["moved"] > 5e-3
        # The window is over: its sums are cleared.
        assert result["sums"] == 0
        for whole, items in zip(result["whole"], result["items"]):
            assert [items[0], items[4], items[5]] == pytest.approx(whole, rel=1e-6)
            overflow, scale, updated, weight = items[1], items[2], items[3], items[7]
            assert (overflow, updated, scale) == (0, 1, variant.loss_scale or 1)
            assert weight == 64 if not variant.weighted else weight in (128, 108)


@pytest.mark.parametrize("name", [name for name, variant in NUMBERS[4].items() if variant.mp > 1])
def test_operators_are_sharded(reports, name):
    """Else the others would compare a data parallel program."""
    for report in reports[4]:
        result = succeeded(report["numbers"][name])
        sent = result["purposes"]["AllReduce of forward of a sharded operator"]
        assert sent >= NUMBERS[4][name].micro_size and result["parts"] > 0


def test_overflow_leaves_everything_as_it_was(reports):
    for report in reports[2]:
        result = succeeded(report["numbers"][_OVERFLOW])
        assert result["moved"] == 0
        assert result["sums"] == 0
        assert all((items[1], items[3]) == (1, 0) for items in result["items"])
        # The scale backs off after each, and is the same on all ranks.
        assert [items[2] for items in result["items"]] == pytest.approx([3e38, 1.5e38])
        assert result["scale"] == pytest.approx(0.75e38)


def test_half_precision_is_scaled_clipped_and_unscaled(reports):
    for report in reports[2]:
        result = succeeded(report["numbers"][_HALF])
        # 11 bits of a gradient, times the learning rate; and not float32.
        assert 1e-6 < result["difference"] < 1e-3
        assert result["moved"] > 1e-2 and result["sums"] == 0
        for whole, items in zip(result["whole"], result["items"]):
            assert [items[0], items[4], items[5]] == pytest.approx(whole, rel=2e-3)
            assert (items[1], items[2], items[3], items[7]) == (0, 64, 1, 64)
        # Two clean windows are its growth interval.
        assert result["scale"] == 128


@pytest.mark.parametrize("size, name", _COUNTS)
def test_communication_is_that_of_the_stock_cells(reports, size, name):
    result = succeeded(next(report["counts"][name] for report in reports[size] if name in report["counts"]))
    ours, stock, micro_size = result["ours"], result["stock"], COUNTS[size][name].micro_size
    for operator in ("AllGather", "ReduceScatter", "AllReduce of gradients", "AssignAdd", "MatMul"):
        assert ours.get(operator, 0) == stock.get(operator, 0), operator
    # One scalar more for the norm; with one micro batch, one more on the way back from the two sums.
    assert ours["AllReduce of norm"] == 1
    assert ours["AllReduce"] == stock["AllReduce"] + (2 if micro_size == 1 else 1)
    # One reduction for each parameter and window, or micro batch where the sums are sharded.
    operator = "AllReduce of gradients" if name.startswith("plain") else "ReduceScatter of gradients"
    assert ours[operator] == _PARAMETERS * (micro_size if name.startswith(("level2", "level3")) else 1)
    if name in ("plain-4", "level1-2"):
        # Each micro batch is added on the device, and one to the optimizer's count of updates.
        assert ours["AssignAdd"] == _PARAMETERS * micro_size + 1
    if name == "level1-2":
        # Inside Model and without AutoParallel it is the same program, and evaluation compiles after training.
        ways = succeeded(reports[2][1]["ways"])
        for operator in ("AllGather", "AllReduce", "ReduceScatter", "AssignAdd", "MatMul", "ApplyMomentum"):
            assert ways["in_model"][operator] == ways["alone"][operator] == ours[operator]
        assert ways["evaluated"] == "nothing"


@pytest.mark.parametrize("setting", REFUSED)
def test_what_would_go_wrong_is_refused(reports, setting):
    (said,) = [found[setting] for report in reports[2] if setting in (found := succeeded(report["refusals"]))]
    assert said.startswith("For '") and REFUSED[setting][1] in said
