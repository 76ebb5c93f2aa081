"""Batches of any shape and content: trained like the whole batch, or refused with a sentence and nothing changed."""

import functools
import gc

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linear_toy import line
from mindspore import Tensor, nn
from step_probe import KeepGradients, changed, values_of
from strategies import batch_of, endless, examples, refusal

from ms_gradaccum import GradAccumulation, TrainOneStepCell, verify


@functools.cache
def classic_step():
    """Compiled once: neither the number of micro batches nor that of batches is in a graph."""
    network = line()
    optimizer = KeepGradients(network.trainable_params())
    return TrainOneStepCell(GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 1), optimizer)


def new_step(micro_size, accumulation_steps):
    step = classic_step()
    step.network.micro_size, step.body.accumulation_steps = micro_size, accumulation_steps
    step.body.buffer.clear()
    return step


def numbers_of(step):
    """All that a refused call must leave alone."""
    events = step.events
    counts = [events.batches, events.micro_batches, events.updates, events.skipped_updates, step.open_batches()]
    return values_of(step) | {"counts": np.array(counts), "training": np.array(step.training)}


GOOD = st.lists(st.sampled_from([-3.0, 0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=9)
X, Y = batch_of(1, 2, 3)
BAD = {
    "nothing": (),
    "no tensor": (None, "y"),
    "one input": (X,),
    "three inputs": (X, Y, Y),
    "rows that disagree": (X, Y[:2]),
    "no rows": batch_of(),
    "no axes": (Tensor(1.0), Tensor(2.0)),
    "one without rows": (X, np.zeros((0, 1), np.float32)),
    "an array of objects": (np.array([[None]] * 3), Y),
    "long doubles": (np.ones((3, 1), np.longdouble), Y),
    "a nest without an end": (X, endless()),
    "an unknown name": {"data": X, "target": Y},
    "a name twice": {"args": (X,), "data": X},
}


def call(step, bad):
    if isinstance(bad, tuple):
        return step(*bad)
    return step(*bad.get("args", ()), **{name: value for name, value in bad.items() if name != "args"})


@examples(30)
@given(
    batches=st.lists(GOOD | st.sampled_from(sorted(BAD)), min_size=1, max_size=5),
    spoiled=st.sampled_from([None, None, np.nan, np.inf]),
    micro_size=st.integers(1, 10),
)
def test_a_batch_is_trained_like_its_rows_or_refused(batches, spoiled, micro_size):
    good = [rows for rows in batches if not isinstance(rows, str)]
    step = new_step(micro_size, max(len(good), 1))
    if good and spoiled is not None:
        good[0].append(spoiled)
    output = None
    for rows in batches:
        if isinstance(rows, str):
            before = numbers_of(step)
            assert refusal(call, step, BAD[rows]) is not None
            assert not changed(before, numbers_of(step))
        else:
            output = step(*batch_of(*rows))
    if output is None:
        return
    all_rows = np.concatenate([np.float64(rows) for rows in good])
    expected = np.mean(-4 * all_rows * all_rows)  # the weight stays at 0
    assert output.updated.asnumpy() == np.isfinite(expected) and output.overflow.asnumpy() != np.isfinite(expected)
    assert output.weight.asnumpy() == len(all_rows)
    if np.isfinite(expected):
        np.testing.assert_allclose(step.optimizer.gradients()[0].item(), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64], ids=lambda dtype: dtype.__name__)
def test_a_dtype_that_the_network_cannot_compute_with_changes_nothing(dtype, eager):
    step = new_step(2, 2)
    step(X, Y)
    before = numbers_of(step)
    # The network's own operator says it, as it does without accumulation.
    assert refusal(step, Tensor(np.ones((3, 1), dtype)), Y, stock="For 'MatMul', the type of 'x2' should be same as")
    assert not changed(before, numbers_of(step))


def test_a_shape_that_the_network_cannot_compute_with_changes_nothing(eager):
    step = new_step(2, 2)
    step(X, Y)
    before = numbers_of(step)
    assert refusal(step, Tensor(np.ones((3, 2), np.float32)), Y, stock="For '?(MatMul|Dense|dense)")
    assert not changed(before, numbers_of(step))


LEAVES = st.sampled_from(["rows", "rows", "array", "no axes", "other rows", "objects", "endless", 3, None, "text"])
NESTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2)
)


def grown(nest, rows):
    """A nest with tensors for the names of its leaves, and whether all of it is good."""
    if isinstance(nest, list):
        return [grown(item, rows) for item in nest]
    if isinstance(nest, dict):
        return {name: grown(item, rows) for name, item in nest.items()}
    values = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    made = {
        "rows": lambda: Tensor(values),
        "array": lambda: values,
        "no axes": lambda: Tensor(1.0),
        "other rows": lambda: Tensor(np.ones((rows + 1, 1), np.float32)),
        "objects": lambda: np.array([[None]] * rows),
        "endless": endless,
    }
    return made[nest]() if isinstance(nest, str) and nest in made else nest


def leaves_of(nest):
    if isinstance(nest, (list, dict)):
        return [leaf for item in (nest.values() if isinstance(nest, dict) else nest) for leaf in leaves_of(item)]
    return [nest]


class Anything(nn.Cell):
    """Takes any inputs."""

    def construct(self, *inputs):
        return inputs


@examples(120)
@given(nests=st.lists(NESTS, max_size=3), rows=st.integers(0, 5), micro_size=st.integers(1, 7))
def test_a_nest_is_split_into_its_rows_or_refused(nests, rows, micro_size):
    found = []
    inputs = [grown(nest, rows) for nest in nests]
    said = refusal(lambda: found.append(GradAccumulation(Anything(), micro_size).split(*inputs)))
    names = [leaf for leaf in leaves_of(nests) if isinstance(leaf, str)]
    split = {name for name in names if name in ("rows", "array", "other rows")}
    good = (
        rows > 0
        and split
        and not {"objects", "endless"} & set(names)
        and ("other rows" not in names or len(split) == 1)
    )
    # Where other rows are the only ones, they are the rows; there is one more of them.
    if rows == 0 and split == {"other rows"} and not {"objects", "endless"} & set(names):
        good = True
    assert (said is None) == bool(good)
    if not found:
        return
    sizes = [part.rows for part in found[0].micro_batches]
    total = rows + ("other rows" in names)
    assert sum(sizes) == total and len(sizes) == min(micro_size, total) and max(sizes) - min(sizes) <= 1
    for place, whole in enumerate(found[0].micro_batches[0].tensors):
        if whole.ndim:
            parts = np.concatenate([part.tensors[place].asnumpy() for part in found[0].micro_batches])
            assert len(parts) == total and (np.diff(parts[:, 0]) >= 0).all()


@pytest.mark.parametrize("bad", BAD)
def test_verify_refuses_what_a_step_refuses(bad):
    cell = nn.WithLossCell(line(), nn.MSELoss())
    before = [(p.name, p.asnumpy().tobytes()) for p in cell.get_parameters()], cell.training, ms.get_context("mode")
    batch = BAD[bad]
    if isinstance(batch, tuple) or "args" not in batch:
        assert refusal(verify, cell, batch, 2) is not None
    after = [(p.name, p.asnumpy().tobytes()) for p in cell.get_parameters()], cell.training, ms.get_context("mode")
    assert before == after and gc.isenabled()
