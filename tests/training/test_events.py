"""The events of micro batches and updates that callbacks get, and their order."""

import pytest
from linear_toy import X, batches, line, mse, sgd, toy, toy_step
from loop_toy import own_loop
from mindspore import Tensor
from mindspore.train import LambdaCallback
from step_probe import Listener

from ms_gradaccum import Accumulator, GradAccumulation

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def listener():
    return Listener()


def micro_batch(batch, index, rows, *counts):
    return [(f"micro_batch_{when}", batch, index, rows, *counts) for when in ("begin", "end")]


def update(batch, before, after):
    return [("update_begin", batch, *before), ("update_end", batch, *after)]


# Three batches of three rows, each in two micro batches, two batches to an update, and the last window flushed.
EXPECTED = [
    *micro_batch(1, 0, 2, 0, 0),
    *micro_batch(1, 1, 1, 0, 0),
    *micro_batch(2, 0, 2, 0, 0),
    *micro_batch(2, 1, 1, 0, 0),
    *update(2, (0, 0), (1, 0)),
    *micro_batch(3, 0, 2, 1, 0),
    *micro_batch(3, 1, 1, 1, 0),
    *update(3, (1, 0), (2, 0)),
]
ROWS = [Tensor(X[:3])] * 3
MICRO_BATCH, UPDATE = ["micro_batch_begin", "micro_batch_end"], ["update_begin", "update_end"]


def test_the_order_of_a_training_step(listener):
    _, step = toy_step(2, accumulation_steps=2)
    step.add_callback(listener)
    assert step.flush() is None  # nothing to tell of
    outputs = [step(x, 2 * x) for x in ROWS] + [step.flush()]
    assert listener.told == EXPECTED
    assert listener.outputs() == [outputs[1], outputs[3]]


def test_the_order_of_a_loop_with_its_last_window(listener):
    network = line()
    accumulator = Accumulator(GradAccumulation(mse(network), 2), sgd(network), 2)
    accumulator.add_callback(listener)
    for x in accumulator.prepare(ROWS):
        with accumulator.accumulate():
            accumulator.backward(x, 2 * x)
            accumulator.clip_grad_norm(1e9)  # measures before step, which tells of the update
            accumulator.step()
            accumulator.zero_grad()
    assert listener.told == EXPECTED


def test_gradients_that_the_caller_takes_are_one_micro_batch_of_unknown_rows(listener):
    _, accumulator = own_loop(2)
    accumulator.add_callback(listener)
    for _ in range(2):
        accumulator((Tensor([[1.0]]),), weight=4)
    first, second = (micro_batch(batch, 0, None, 0, 0) for batch in (1, 2))
    assert listener.told == [*first, *second, *update(2, (0, 0), (1, 0))]


def test_of_several_networks_each_update_is_told(listener):
    cells = [mse(line()) for _ in range(2)]
    accumulator = Accumulator(cells, [sgd(cell) for cell in cells])
    accumulator.add_callback(listener)
    with accumulator.accumulate():
        for cell in cells:
            accumulator.backward(ROWS[0], ROWS[0], network=cell)
        accumulator.step()
    assert [told[0] for told in listener.told] == 2 * MICRO_BATCH + 2 * UPDATE
    assert {told[1] for told in listener.told} == {1}


def test_model_tells_its_callbacks_while_it_trains_and_no_longer(listener):
    _, model = toy(micro_size=2, accumulation_steps=3)
    model.train(2, batches(2), callbacks=[listener])  # four batches an epoch, the last one flushed
    names = [told[0] for told in listener.told]
    assert names == 2 * (6 * MICRO_BATCH + UPDATE + 2 * MICRO_BATCH + UPDATE)
    assert listener.told[-1] == ("update_end", 8, 4, 0)
    model.train(1, batches(8))
    assert len(listener.told) == len(names)


def test_a_callback_that_is_added_while_a_model_trains_stays(listener):
    _, model = toy()

    def add(run_context):
        if not listener.told:
            run_context.original_args().train_network.add_callback(listener)

    adds = LambdaCallback(on_train_begin=add)
    for updates in (1, 2):
        model.train(1, batches(8), callbacks=[adds])
        assert listener.told[-1] == ("update_end", updates, updates, 0)
