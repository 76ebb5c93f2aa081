"""Changes of tensors are seen to the bit, and undone where a copy is kept."""

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses
from step_probe import Of

from ms_gradaccum.backend import arrays, snapshot
from ms_gradaccum.backend.arrays import few_elements
from ms_gradaccum.backend.snapshot import Snapshot, SnapshotTensors, _fingerprint

SHAPES = st.sampled_from([(), (1,), (7,), (3, 5), (4096 * 8 + 3,), (2, 0)])
KINDS = st.sampled_from([np.float32, np.float16, np.int64, np.int8, np.bool_])


@given(shape=SHAPES, kind=KINDS, seed=st.integers(0, 2**16))
def test_each_bit_of_an_array_counts(shape, kind, seed):
    numbers = np.random.default_rng(seed)
    array = numbers.integers(0, 2, shape).astype(kind)
    before = _fingerprint(Tensor(array))
    assert _fingerprint(Tensor(array.copy())) == before
    if array.size:
        place = numbers.integers(array.size)
        array.reshape(-1).view(np.uint8)[place * array.itemsize] ^= 1
        assert _fingerprint(Tensor(array)) != before


def test_rows_that_change_places_are_seen():
    queue = np.random.default_rng(0).normal(size=(4096, 16)).astype(np.float32)
    assert _fingerprint(Tensor(queue)) != _fingerprint(Tensor(np.roll(queue, 1, 0)))
    # Its numbers change places in whole words, also far apart, and in one row.
    simple = np.arange(2**18, dtype=np.float32)
    for numbers in (2, 512, 2**17):
        assert _fingerprint(Tensor(simple)) != _fingerprint(Tensor(np.roll(simple, numbers)))
    assert _fingerprint(Tensor(simple[:4])) != _fingerprint(Tensor(np.roll(simple[:4], 2)))


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.int32, ms.bool_])
def test_a_copy_is_put_back(dtype):
    tensors = [Parameter(Tensor([0, 1, 1], dtype), "weight"), Tensor([1, 0, 1], dtype)]
    kept = SnapshotTensors(tensors)
    assert kept.changed() == []
    tensors[0].set_data(Tensor([1, 1, 1], dtype))
    tensors[1].assign_value(Tensor([1, 1, 1], dtype))
    assert kept.changed() == [0, 1]
    kept.put_back()
    assert kept.changed() == []
    assert [tensor.float().asnumpy().tolist() for tensor in tensors] == [[0, 1, 1], [1, 0, 1]]


def test_a_pass_that_changes_what_has_no_copy_raises(monkeypatch):
    monkeypatch.setattr(snapshot, "SMALL_SIZE", 0)
    network = nn.Dense(2, 2)
    with refuses(RuntimeError, "'weight'", "out of training"):
        with snapshot.kept(network):
            network.weight.set_data(Tensor(np.full((2, 2), 9, np.float32)))


class Attending(nn.Cell):
    def __init__(self):
        super().__init__()
        self.attention, self.calls = nn.MultiheadAttention(4, 2, batch_first=True), 0

    def construct(self, x):
        self.calls += 1
        return self.attention(x, x, x)[0]


def test_attributes_that_mindspores_cells_set_are_not_the_users(eager):
    network = Attending()
    before, state = dict(vars(network.attention)), Snapshot(network)
    network(ops.ones((2, 3, 4)))
    assert any(before[name] is not value for name, value in vars(network.attention).items())
    assert state.tensors.changed() == [] and state.changed_names() == ["'Attending.calls'"]


def remembering():
    """A network whose function keeps its first result."""
    first = None

    def remember(x):
        nonlocal first
        first = x if first is None else first
        return first

    return Of(nn.Identity(), remember)


def test_a_variable_of_a_closure_that_was_none_is_put_back(eager):
    network = remembering()
    state = Snapshot(network)
    network(ops.ones(1))
    state.put_back()
    assert network(ops.zeros(1)) == 0


@pytest.mark.parametrize("shape", [(), (1,), (3,), (9, 2), (127,), (30, 100), (2, 0)])
def test_a_slice_of_a_device_has_the_elements_of_the_host(monkeypatch, shape, mode):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    parameter = Parameter(Tensor(values), "values")
    own = few_elements(parameter)
    assert own.size == values.size if values.size < 128 else own.size in range(64, 128)
    monkeypatch.setattr(arrays, "is_host", lambda: False)
    np.testing.assert_array_equal(few_elements(parameter), own)
