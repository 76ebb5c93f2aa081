"""The objects of a training that have state: each gives it as JSON and takes it back, all of it or nothing."""

import collections
import copy
import json

import mindspore as ms
import pytest
from linear_toy import line, toy_step
from loop_toy import own_loop
from mindspore import Parameter, Tensor
from mindspore.experimental import optim
from open_window import window_of
from refusal import refuses

from ms_gradaccum._checks import DamagedState, all_or_nothing
from ms_gradaccum.backend.plain_state import PlainState
from ms_gradaccum.gradients.loss_scaler import ForeignLossScale, NoLossScale
from ms_gradaccum.loops.schedule import PreparedScheduler
from ms_gradaccum.training.events import Events

pytestmark = pytest.mark.usefixtures("eager")


class OwnScale(ms.amp.LossScaleManager):
    def __init__(self):
        self.scales, self.name, self.seen = [8.0, 4.0], "own", Parameter(Tensor(1.0, ms.float32))

    def get_loss_scale(self):
        return self.scales[0]

    def update_loss_scale(self, overflow):
        self.scales = self.scales[::-1]
        self.seen.set_data(self.seen + 1.5)


# Those that the trainings of test_state.py do not have.
def scheduler(updates):
    optimizer = optim.SGD(line().trainable_params(), lr=0.5)
    parts = [optim.lr_scheduler.StepLR(optimizer, 2, 0.5), optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    prepared = PreparedScheduler(optim.lr_scheduler.SequentialLR(optimizer, parts, [3]), lambda: True)
    for _ in range(updates):
        prepared.is_due = True
        prepared.step()
    return prepared


def loss_scale(updates):
    scale = ForeignLossScale(OwnScale())
    for _ in range(updates):
        scale.adjust(Tensor(False), Tensor(True))
    return scale.chooser_state


def damaged(saved):
    """Broken states: one place, at any depth, has nothing, or a value that is never a part of a state."""
    if isinstance(saved, (dict, list)):
        for key in saved if isinstance(saved, dict) else range(len(saved)):
            for other in damaged(saved[key]):
                changed = copy.copy(saved)
                changed[key] = other
                yield changed
        if isinstance(saved, dict) and saved:
            yield {key: value for key, value in list(saved.items())[1:]}
    yield None
    yield [[object]]


@pytest.mark.parametrize("build", [scheduler, loss_scale])
def test_an_object_takes_a_state_or_is_as_it_was(build):
    item = build(0)
    saved = json.loads(json.dumps(build(3).state_dict()))
    before, tried = item.state_dict(), 0
    assert before != saved
    for broken in damaged(saved):
        tried += 1
        with pytest.raises(DamagedState):
            item.load_state_dict(broken)
        assert item.state_dict() == before
    assert tried > 4
    item.load_state_dict(saved)
    assert item.state_dict() == saved


@pytest.mark.parametrize("count", [True, -1, 1.5, 2**62, "1", None])
def test_a_count_is_a_whole_number_that_its_counter_can_hold(count):
    events, loop = Events("it"), own_loop()[1].driver
    with refuses(DamagedState, "how many batches and updates there were"):
        events.load_state_dict({**events.state_dict(), "updates": count})
    counts = loop.state_dict()
    with refuses(DamagedState, "how many batches and updates its loop"):
        loop.load_state_dict({**counts, "counter": {**counts["counter"], "updates": count}})
    window = window_of(toy_step(2, accumulation_steps=3, mixed_precision=OwnScale())[1])
    with refuses(DamagedState, "how many batches and overflows"):
        window.load_state_dict({**window.state_dict(), "batches": 2**31})


def test_a_step_without_a_loss_scale_of_its_own_refuses_one():
    scale = NoLossScale().chooser_state
    scale.load_state_dict(scale.state_dict())
    with refuses(DamagedState, "optimizer or setting"):
        scale.load_state_dict(ForeignLossScale(OwnScale()).chooser_state.state_dict())


Pair = collections.namedtuple("Pair", "a b")


class Mixed:
    """Numbers beside parameters in one list, and in a tuple, whose numbers nobody can set."""

    def __init__(self, number, value):
        self.own = [Parameter(Tensor([value], ms.float32)), number, [Parameter(Tensor([value], ms.float32)), "a", (1,)]]
        self.fixed = (Parameter(Tensor([value], ms.float32)), float("nan"))
        self.own.append(Pair(number, 2))


def test_numbers_in_a_list_of_parameters_come_back():
    used, fresh = Mixed(0.5, 2.0), Mixed(0.1, 1.0)
    used.own[2][1:] = "b", (2,)
    first = fresh.own[0]
    saved = json.loads(json.dumps(PlainState(used).state_dict()))
    PlainState(fresh).load_state_dict(saved)
    assert fresh.own[0] is first and fresh.own[1] == 0.5 and fresh.own[2][1:] == ["b", (2,)]
    assert first.asnumpy() == fresh.own[2][0].asnumpy() == fresh.fixed[0].asnumpy() == 2.0
    assert fresh.own[3] == Pair(0.5, 2) and fresh.own[3].b == 2
    for place, value in ((1, "x"), (3, 2)):
        other, damaged = Mixed(0.1, 1.0), copy.deepcopy(saved)
        damaged["own"][place] = value
        with pytest.raises(DamagedState):
            PlainState(other).load_state_dict(damaged)
        assert other.own[0].asnumpy() == 1.0 and other.own[1] == 0.1


def test_a_failure_of_any_kind_leaves_everything():
    events = Events("it")
    events.batches = 2
    before = events.state_dict()
    with pytest.raises(KeyboardInterrupt), all_or_nothing(events):
        events.load_state_dict(Events("it").state_dict())
        raise KeyboardInterrupt
    assert events.state_dict() == before
