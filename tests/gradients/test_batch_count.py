"""The number of batches in an open window: the host counts, and a checkpoint or a graph may write it, too."""

import mindspore as ms
import pytest
from linear_toy import line
from mindspore import Parameter, ParameterTuple, Tensor
from step_probe import number

from ms_gradaccum.gradients.buffer import BatchCount, GradientBuffer


@pytest.fixture
def buffer():
    return GradientBuffer(ParameterTuple(line().trainable_params()))


@pytest.fixture
def count(buffer):
    return BatchCount(buffer)


def load(buffer, batches):
    """Load a checkpoint of MindSpore with so many batches."""
    ms.load_param_into_net(buffer, {buffer.batches.name: Parameter(Tensor(batches, ms.int32), buffer.batches.name)})


def test_it_is_written_for_checkpoints(buffer, count):
    for batches in (1, 2, 0):
        count.set(batches)
        assert number(buffer.batches) == count.get() == batches and not count.was_changed()


def test_a_number_that_is_not_written_yet_is_not_lost(buffer, count):
    count.set(2, writes=False)
    assert count.get() == 2 and number(buffer.batches) == 0
    assert count.read() == 2 and number(buffer.batches) == 2 and not count.was_changed()


@pytest.mark.parametrize("known", [0, 2])
def test_the_number_of_a_loaded_checkpoint_holds_and_is_told_once(buffer, count, known):
    count.set(known)
    load(buffer, 3)
    # Also after it was read.
    assert count.get() == 3
    assert count.was_changed() and not count.was_changed()
    count.set(4)
    assert number(buffer.batches) == count.read() == 4 and not count.was_changed()


def test_a_checkpoint_with_the_same_number_changes_nothing(buffer, count):
    count.set(3)
    load(buffer, 3)
    assert not count.was_changed() and count.get() == 3


def test_a_number_of_before_a_checkpoint_is_not_written_over_it(buffer, count):
    count.set(2, writes=False)
    load(buffer, 1)
    assert count.get() == number(buffer.batches) == 1 and count.was_changed()


def test_a_graph_that_counts_is_followed(buffer, count):
    buffer.counts_in_graph = True
    buffer.batches += 1
    assert count.get() == 1 and count.was_changed()
    count.set(1)
    buffer.batches += 1
    assert count.get() == 2
