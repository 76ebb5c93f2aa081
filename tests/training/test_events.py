"""The events of micro batches and updates that callbacks get, and their order."""

import pytest
from linear_toy import X, batches, line, sgd, toy, toy_step
from mindspore import Tensor, nn
from mindspore.train import Callback

from ms_gradaccum import Accumulator, GradAccumulation, StepEvent
from ms_gradaccum.loops.epoch import PassSteps

pytestmark = pytest.mark.usefixtures("eager")


class Listener(Callback):
    """Notes what it is told: the name without "on_", the counts, and the loss if there is one."""

    def __init__(self):
        super().__init__()
        self.told = []
        self.events = []

    def note(self, name, event):
        assert isinstance(event, StepEvent)
        self.events.append(event)
        place = (event.batch,) if event.micro_batch is None else (event.batch, event.micro_batch, event.rows)
        self.told.append((name, *place, event.updates, event.skipped_updates))

    def on_micro_batch_begin(self, event):
        self.note("micro_batch_begin", event)

    def on_micro_batch_end(self, event):
        self.note("micro_batch_end", event)

    def on_update_begin(self, event):
        self.note("update_begin", event)

    def on_update_end(self, event):
        self.note("update_end", event)

    def outputs(self):
        return [event.output for event in self.events if event.output is not None]


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


def test_the_order_of_a_training_step(listener):
    _, step = toy_step(2, accumulation_steps=2)
    step.add_callback(listener)
    assert step.flush() is None  # nothing to tell of
    outputs = [step(x, 2 * x) for x in ROWS] + [step.flush()]
    assert listener.told == EXPECTED
    assert listener.outputs() == [outputs[1], outputs[3]]


def test_the_order_of_a_loop_with_its_last_window(listener):
    network = line()
    loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
    accumulator = Accumulator(loss_cell, sgd(network), 2)
    accumulator.add_callback(listener)
    for x in accumulator.prepare(ROWS):
        with accumulator.accumulate():
            accumulator.backward(x, 2 * x)
            accumulator.clip_grad_norm(1e9)  # measures before step, which tells of the update
            accumulator.step()
            accumulator.zero_grad()
    assert listener.told == EXPECTED


def test_a_batch_that_begins_a_window_anew_is_counted_once(listener):
    network = line()
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), sgd(network), 2)
    accumulator.add_callback(listener)
    for number in range(2):
        with accumulator.accumulate():
            if number:
                accumulator.flush()  # the batch before: this one has added nothing yet
            accumulator.backward(ROWS[0], ROWS[0])
    assert [told[:2] for told in listener.told if told[0].endswith("_end")] == [
        ("micro_batch_end", 1),
        ("update_end", 2),
        ("micro_batch_end", 2),
    ]


def test_gradients_that_the_caller_takes_are_one_micro_batch_of_unknown_rows(listener):
    network = line()
    accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), sgd(network), 2)
    accumulator.add_callback(listener)
    for _ in range(2):
        accumulator((Tensor([[1.0]]),), weight=4)
    first, second = (micro_batch(batch, 0, None, 0, 0) for batch in (1, 2))
    assert listener.told == [*first, *second, *update(2, (0, 0), (1, 0))]


def test_of_several_networks_each_update_is_told(listener):
    networks = [line(), line()]
    cells = [nn.WithLossCell(network, nn.MSELoss()) for network in networks]
    accumulator = Accumulator(cells, [sgd(network) for network in networks])
    accumulator.add_callback(listener)
    with accumulator.accumulate():
        for cell in cells:
            accumulator.backward(ROWS[0], ROWS[0], network=cell)
        accumulator.step()
    assert [told[0] for told in listener.told] == 2 * ["micro_batch_begin", "micro_batch_end"] + 2 * [
        "update_begin",
        "update_end",
    ]
    assert {told[1] for told in listener.told} == {1}


def test_model_tells_its_callbacks_while_it_trains_and_no_longer(listener):
    _, model = toy(micro_size=2, accumulation_steps=3)
    model.train(2, batches(2), callbacks=[listener])  # four batches an epoch
    names = [told[0] for told in listener.told]
    window = 3 * 2 * ["micro_batch_begin", "micro_batch_end"] + ["update_begin", "update_end"]
    flushed = 2 * ["micro_batch_begin", "micro_batch_end"] + ["update_begin", "update_end"]
    assert names == 2 * (window + flushed)
    assert listener.told[-1] == ("update_end", 8, 4, 0)
    model.train(1, batches(8))
    assert len(listener.told) == len(names)


def test_a_callback_that_is_added_while_a_model_trains_stays(listener):
    _, model = toy()

    class Adds(Callback):
        def on_train_begin(self, run_context):
            if not listener.told:
                run_context.original_args().train_network.add_callback(listener)

    adds = Adds()
    for updates in (1, 2):
        model.train(1, batches(8), callbacks=[adds])
        assert listener.told[-1] == ("update_end", updates, updates, 0)


def test_a_callback_that_is_added_again_hears_each_event_once(listener):
    _, step = toy_step(2)
    for _ in range(2):
        step.add_callback(listener)
        step(*ROWS[:1] * 2)
    assert [told[0] for told in listener.told].count("update_end") == 2


def test_model_tells_of_the_update_of_a_graph(listener):
    """In data sink mode the step is not called from Python, and its output comes as a plain tuple."""
    _, model = toy()
    output = model.train_network(Tensor(X), Tensor(2 * X))

    class Context:
        net_outputs, cur_step_num, batch_num, cur_epoch_num = tuple(output._asdict().values()), 1, 4, 1

        def original_args(self):
            return self

    steps = PassSteps(model, [], batches(2), 0, 1)
    with model.train_network.events.listening([listener]):
        steps.on_train_step_end(Context())
    assert [told[0] for told in listener.told] == ["update_end"]
    assert [told._asdict() for told in listener.outputs()] == [output._asdict()]
