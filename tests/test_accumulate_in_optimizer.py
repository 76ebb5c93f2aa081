"""accumulate_in_optimizer: sums in the moments of nn.Momentum train what sums in a buffer of their own do."""

from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from linear_toy import whole
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from step_probe import number

from ms_gradaccum import (
    HSDP,
    ClipByGlobalNorm,
    DataParallel,
    GradAccumulation,
    Model,
    TrainOneStepCell,
    find_micro_size,
    load_state,
    save_state,
)
from ms_gradaccum.loss_scale import NoLossScale
from ms_gradaccum.precision import Precision

# Windows of batches that micro_size 3 divides, and of others, down to a single row.
ROWS = (6, 7, 5, 1, 6)
MOMENTUM, RATE = 0.9, 0.05
REASON = "The gradient is never apart from the optimizer's state."
KNOWN = "The weight of a window must be known before its first micro batch."


class Squares(nn.Cell):
    """Its gradient depends on the weights; the loss is a mean over the rows."""

    def __init__(self, dtype=np.float32):
        super().__init__()
        self.weight = Parameter(Tensor(np.array([0.5, -1, 2], dtype)), "weight")

    def construct(self, x):
        return ops.square((x * self.weight).sum(-1)).mean()


class Sums(Squares):
    returns_weight = True

    def construct(self, x):
        return ops.square((x * self.weight).sum(-1)).sum(), float(x.shape[0])


def data(rows=ROWS, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(count, 3)).astype(np.float32) for count in rows]


def momentum(cell, **settings):
    return nn.Momentum(cell.trainable_params(), **{"learning_rate": RATE, "momentum": MOMENTUM, **settings})


def build(micro_size=3, optimizer=momentum, **settings):
    cell = Squares()
    loss_cell = GradAccumulation(cell, micro_size)
    return cell, TrainOneStepCell(loss_cell, optimizer(cell), **{"accumulate_in_optimizer": True, **settings})


def by_hand(windows, factor=1.0, start=1.0, weight=(0.5, -1, 2)):
    """Weights and moments after one update per window, in float64; ``factor`` and ``start`` make mistakes."""
    weight, moments = np.array(weight, np.float64), np.zeros(3)
    for x in windows:
        x = x.astype(np.float64)
        moments = start * MOMENTUM * moments + factor * (2 * (x @ weight)[:, None] * x).mean(0)
        weight = weight - RATE * moments
    return weight, moments


def assert_like(cell, step, expected, rtol=2e-5):
    np.testing.assert_allclose(cell.weight.asnumpy(), expected[0], rtol=rtol)
    np.testing.assert_allclose(step.optimizer.moments[0].asnumpy(), expected[1], rtol=rtol)


@pytest.mark.parametrize("micro_size", [1, 3])
def test_windows_train_like_whole_batches(micro_size, mode):
    cell, step = build(micro_size)
    outputs = [step(Tensor(x)) for x in data()]
    assert_like(cell, step, by_hand(data()))
    assert [number(output.weight) for output in outputs] == list(ROWS)
    assert all(number(output.updated) and not number(output.overflow) for output in outputs)
    first = data()[0].astype(np.float64)
    assert number(outputs[0].loss) == pytest.approx(np.square(first @ [0.5, -1, 2]).mean(), rel=1e-5)


def test_windows_train_op_by_op(eager):
    cell, step = build()
    for x in data():
        step(Tensor(x))
    assert_like(cell, step, by_hand(data()))


def test_the_comparison_sees_a_start_or_a_division_that_is_wrong():
    """Moments that were left as they are, multiplied by rows that are not there, or sums that were not divided."""
    right = np.concatenate(by_hand(data()))
    mistakes = [by_hand(data(), start=1 / MOMENTUM), by_hand(data(), start=6 / 7), by_hand(data(), 1 / (1 + MOMENTUM))]
    for wrong in mistakes:
        assert np.abs(np.concatenate(wrong) / right - 1).max() > 1e-2


def test_there_are_no_sums_beside_the_moments():
    _, step = build()
    ordinary = build(accumulate_in_optimizer=False)[1]
    names = [item.name for item in step.get_parameters() if item.size > 1]
    assert sorted(names) == ["moments.weight", "weight"]
    assert "accu_grads.weight" in [item.name for item in ordinary.get_parameters()]
    assert step.buffer.sums[0] is step.optimizer.moments[0]


def test_there_is_no_norm_of_a_gradient(eager):
    _, step = build()
    output = step(Tensor(data()[0]))
    assert np.isnan(number(output.grad_norm)) and np.isnan(number(output.clipped_grad_norm))
    assert output.ends_window


def test_decay_groups_schedules_and_a_new_momentum_do_as_without(eager):
    """All that is linear in the gradient, or no matter of the gradient."""

    def optimizer(cell):
        rate = nn.ExponentialDecayLR(0.1, 0.5, 2)
        return nn.Momentum([{"params": cell.trainable_params(), "weight_decay": 0.1, "lr": rate}], 0.1, MOMENTUM)

    weights = []
    for in_optimizer in (True, False):
        cell, step = build(optimizer=optimizer, accumulate_in_optimizer=in_optimizer)
        for i, x in enumerate(data()):
            if i == 3:
                ops.assign(step.optimizer.momentum, Tensor(0.5, ms.float32))
            output = step(Tensor(x))
        weights.append(np.concatenate([cell.weight.asnumpy(), step.optimizer.moments[0].asnumpy()]))
        assert number(output.learning_rate) == pytest.approx(0.1 * 0.5**2)
    np.testing.assert_allclose(*weights, rtol=2e-5)
    assert np.abs(weights[0][:3] / by_hand(data())[0] - 1).max() > 1e-2


def test_many_tensors_take_turns(monkeypatch):
    """Runs of tensors each get their start and their division once."""
    import ms_gradaccum.runs as runs

    monkeypatch.setattr(runs, "_FEW", 1)
    monkeypatch.setattr(runs, "_COMPILED", 1)
    results = []
    for in_optimizer in (True, False):
        # What it is compared with runs op by op: to compile it would take most of the time.
        monkeypatch.setenv("MS_JIT", str(int(in_optimizer)))
        ms.set_seed(1)
        network = nn.SequentialCell(*[nn.Dense(3, 3) for _ in range(2)])
        loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
        step = TrainOneStepCell(loss_cell, momentum(network), accumulate_in_optimizer=in_optimizer)
        assert len(step.buffer.runs) > 1
        for x in data():
            step(Tensor(x), Tensor(np.ones_like(x)))
        results.append(np.concatenate([item.asnumpy().ravel() for item in network.get_parameters()]))
    np.testing.assert_allclose(*results, rtol=2e-5, atol=1e-6)


def test_sparse_lookups_are_added_into_the_moments():
    tables = []
    for in_optimizer in (True, False):
        table = Tensor(np.arange(8, dtype=np.float32).reshape(4, 2))
        lookup = nn.EmbeddingLookup(4, 2, table, target="CPU")
        cell = nn.WithLossCell(lookup, nn.MSELoss())
        step = TrainOneStepCell(GradAccumulation(cell, 2), momentum(cell), accumulate_in_optimizer=in_optimizer)
        ids = Tensor([0, 1, 1, 2], ms.int32)
        for _ in range(3):
            step(ids, Tensor(np.ones((4, 2), np.float32)))
        tables.append(lookup.embedding_table.asnumpy())
    np.testing.assert_allclose(*tables, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_window_that_is_not_finite_makes_no_update_and_takes_the_momentum_with_it(value):
    cell, step = build()
    first, bad, *rest = data()
    step(Tensor(first))
    before = cell.weight.asnumpy().copy()
    bad[4, 1] = value
    with pytest.warns(UserWarning, match="the momentum starts anew from zero"):
        output = step(Tensor(bad))
    assert number(output.overflow) and not number(output.updated) and output.ends_window
    np.testing.assert_array_equal(cell.weight.asnumpy(), before)
    np.testing.assert_array_equal(step.optimizer.moments[0].asnumpy(), np.zeros(3))
    # From there on it trains as a new optimizer does.
    step(Tensor(rest[0]))
    assert_like(cell, step, by_hand(rest[:1], weight=before))


def test_a_batch_that_fails_after_its_first_micro_batch_takes_the_momentum_with_it(eager):
    cell, step = build()
    step(Tensor(data()[0]))
    before = cell.weight.asnumpy().copy()

    def fail(index, rows):
        if index == 1:
            raise KeyboardInterrupt

    step.events.micro_batch_begin = fail
    with pytest.warns(UserWarning, match="the momentum starts anew"), pytest.raises(KeyboardInterrupt):
        step(Tensor(data()[1]))
    np.testing.assert_array_equal(cell.weight.asnumpy(), before)
    np.testing.assert_array_equal(step.optimizer.moments[0].asnumpy(), np.zeros(3))
    assert number(step.buffer.weight) == 0


@pytest.mark.parametrize("shape", [(0, 3), (6, 2)], ids=str)
def test_a_batch_that_is_refused_leaves_the_momentum_alone(shape, mode, recwarn):
    """Without rows it is no batch at all; with two columns the network has no graph for it, nor anything else."""
    cell, step = build()
    step(Tensor(data()[0]))
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)):
            step(Tensor(np.zeros(shape, np.float32)))
    step(Tensor(data()[1]))
    assert_like(cell, step, by_hand(data()[:2]))
    assert not [each for each in recwarn if "momentum" in str(each.message)]


def test_a_callback_that_fails_before_the_first_micro_batch_leaves_the_momentum_alone(recwarn, eager):
    cell, step = build()
    step(Tensor(data()[0]))
    moments = step.optimizer.moments[0].asnumpy().copy()
    with mock.patch.object(step.events, "micro_batch_begin", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            step(Tensor(data()[1]))
    np.testing.assert_allclose(step.optimizer.moments[0].asnumpy(), moments, rtol=3e-7)
    step(Tensor(data()[1]))
    assert_like(cell, step, by_hand(data()[:2]))
    assert not [each for each in recwarn if "momentum" in str(each.message)]


def test_an_interrupt_while_the_moments_become_sums_takes_the_momentum_with_it(eager):
    _, step = build()
    step(Tensor(data()[0]))
    opening = step.micro_steps.run_opening

    def interrupted(*inputs):
        opening(*inputs)
        raise KeyboardInterrupt

    with mock.patch.object(step.micro_steps, "run_opening", interrupted):
        with pytest.warns(UserWarning, match="the momentum starts anew"), pytest.raises(KeyboardInterrupt):
            step(Tensor(data()[1]))
    np.testing.assert_array_equal(step.optimizer.moments[0].asnumpy(), np.zeros(3))


def test_without_momentum_a_batch_that_is_refused_changes_nothing(eager):
    """What 0 has taken cannot be given back, and nobody needs it."""
    cell, step = build(optimizer=lambda cell: momentum(cell, momentum=0.0))
    step(Tensor(data()[0]))
    with pytest.raises((ValueError, RuntimeError)):
        step(Tensor(np.zeros((6, 2), np.float32)))
    output = step(Tensor(data()[1]))
    assert number(output.updated)
    assert_like(cell, step, by_hand(data()[:2], start=0.0))


def test_a_state_goes_on_where_it_was_saved(tmp_path, eager):
    windows = data()
    cell, step = build()
    for x in windows[:3]:
        step(Tensor(x))
    save_state(step, tmp_path / "state")
    resumed, other = build()
    load_state(other, tmp_path / "state")
    np.testing.assert_array_equal(other.optimizer.moments[0].asnumpy(), step.optimizer.moments[0].asnumpy())
    for x in windows[3:]:
        other(Tensor(x))
    assert_like(resumed, other, by_hand(windows))


def test_states_move_between_sums_in_a_buffer_and_in_the_optimizer(tmp_path, eager):
    windows = data()
    _, step = build(accumulate_in_optimizer=False)
    for x in windows[:3]:
        step(Tensor(x))
    save_state(step, tmp_path / "state")
    cell, other = build()
    load_state(other, tmp_path / "state")
    for x in windows[3:]:
        other(Tensor(x))
    assert_like(cell, other, by_hand(windows))


@pytest.mark.parametrize(
    "event,refused",
    [("on_micro_batch_begin", True), ("on_micro_batch_end", True), ("on_update_begin", True), ("on_update_end", False)],
)
def test_inside_a_window_there_is_no_state_to_save(event, refused, tmp_path, eager):
    cell, step = build()
    said = []

    class Saver:
        pass

    def save(self, event):
        try:
            save_state(step, tmp_path)
        except RuntimeError as error:
            said.append(str(error))

    setattr(Saver, event, save)
    step.add_callback(Saver())
    for x in data()[:2]:
        step(Tensor(x))
    assert_like(cell, step, by_hand(data()[:2]))
    assert bool(said) == refused and all("the call must be between two windows" in each for each in said)
    save_state(step, tmp_path)


@pytest.mark.parametrize("dataset_sink_mode", [False, True])
def test_a_model_trains_with_it(dataset_sink_mode):
    x = np.concatenate(data((6, 6, 6)))
    cell = Squares()
    model = Model(GradAccumulation(cell, 3), optimizer=momentum(cell), accumulate_in_optimizer=True)
    dataset = NumpySlicesDataset(x, column_names=["x"], shuffle=False).batch(6)
    model.train(2, dataset, dataset_sink_mode=dataset_sink_mode)
    expected = by_hand(np.split(x, 3) * 2)
    np.testing.assert_allclose(cell.weight.asnumpy(), expected[0], rtol=2e-5)


def test_as_part_of_a_larger_graph_a_bad_window_restarts_the_momentum():
    cell, step = build()
    outer = Outer(step)
    first, second, bad, last = data((6, 6, 6, 6))
    bad[4, 1] = np.nan
    ms.set_context(mode=ms.GRAPH_MODE)
    updated = [bool(outer(Tensor(x)).asnumpy()) for x in (first, second, bad, last)]
    assert updated == [True, True, False, True]
    weight, _ = by_hand([first, second])
    assert_like(cell, step, by_hand([last], weight=weight))


class Outer(nn.Cell):
    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, x):
        return self.step(x)[3]


def test_find_micro_size_measures_it():
    cell = Squares()
    batch = Tensor(data()[0])
    assert find_micro_size(GradAccumulation(cell, 1), momentum(cell), batch, "8GiB", accumulate_in_optimizer=True) == 1
    with pytest.raises(ValueError, match=whole(refusal("find_micro_size", "clip", "None", f"{CLIP!r}", REASON))):
        find_micro_size(cell, momentum(cell), batch, "8GiB", accumulate_in_optimizer=True, clip=CLIP)


CLIP = ClipByGlobalNorm(1.0)


def refusal(owner, name, rule, got, remedy):
    return f"For '{owner}', the argument '{name}' must be {rule} with accumulate_in_optimizer, but got {got}. {remedy}"


@pytest.mark.parametrize(
    "settings,name,rule,got,remedy",
    [
        ({"accumulation_steps": 2}, "accumulation_steps", "1", 2, "Give larger batches instead."),
        ({"clip": CLIP}, "clip", "None", repr(CLIP), REASON),
        ({"bad_micro_batch": "drop"}, "bad_micro_batch", "'skip_window'", "'drop'", KNOWN),
    ],
)
def test_what_needs_sums_of_their_own_is_refused(settings, name, rule, got, remedy):
    with pytest.raises(ValueError, match=whole(refusal("TrainOneStepCell", name, rule, got, remedy))):
        build(**settings)


def test_a_loss_scale_is_refused():
    with pytest.raises(ValueError, match="'mixed_precision' must be without a loss scale or a reduce_dtype with"):
        build(mixed_precision="fp16")


def test_sums_that_the_ranks_round_are_refused(monkeypatch):
    rounded = Precision("O0", ms.float32, NoLossScale(), "bf16", ms.bfloat16)
    monkeypatch.setattr("ms_gradaccum.train_step.check_precision", lambda owner, mixed_precision: rounded)
    with pytest.raises(ValueError, match="'mixed_precision' must be without a loss scale or a reduce_dtype with"):
        build()


def test_a_loss_with_weights_of_its_own_is_refused():
    cell = Sums()
    message = refusal(
        "TrainOneStepCell", "network", "one of a mean loss over rows", "one that returns its own weight", KNOWN
    )
    with pytest.raises(ValueError, match=whole(message)):
        TrainOneStepCell(GradAccumulation(cell, 2), momentum(cell), accumulate_in_optimizer=True)


@pytest.mark.parametrize(
    "optimizer,rule,got",
    [
        (lambda cell: nn.SGD(cell.trainable_params(), 0.1, momentum=0.9), "nn.Momentum", "SGD"),
        (lambda cell: nn.Adam(cell.trainable_params()), "nn.Momentum", "Adam"),
        (lambda cell: momentum(cell, use_nesterov=True), "nn.Momentum without Nesterov", "use_nesterov=True"),
        (lambda cell: momentum(cell, loss_scale=2.0), "nn.Momentum with loss_scale=1.0", "loss_scale=2.0"),
        (
            lambda cell: nn.Momentum([{"params": cell.trainable_params(), "grad_centralization": True}], 0.1, 0.9),
            "nn.Momentum without grad_centralization",
            "a group with it",
        ),
    ],
)
def test_other_optimizers_are_refused(optimizer, rule, got):
    start = (
        f"For 'TrainOneStepCell', the argument 'optimizer' must be {rule} with accumulate_in_optimizer, but got {got}."
    )
    with pytest.raises(ValueError) as error:
        build(optimizer=optimizer)
    assert str(error.value).startswith(start)


def test_16_bit_moments_are_refused():
    cell = Squares(np.float16)
    with pytest.raises(ValueError, match="must be one of float32 weights with accumulate_in_optimizer, but got 16-bit"):
        TrainOneStepCell(cell, momentum(cell), accumulate_in_optimizer=True)


@pytest.mark.parametrize("value", [1, None, "True"])
def test_the_setting_is_a_bool(value):
    with pytest.raises(TypeError, match="'accumulate_in_optimizer' must be a bool, but got"):
        build(accumulate_in_optimizer=value)


@pytest.mark.parametrize("kind", [HSDP(), DataParallel(sync_each_batch=True)])
def test_what_shards_sums_or_state_is_refused(kind, monkeypatch):
    monkeypatch.setattr("ms_gradaccum.train_step.check_parallel", lambda owner, parallel, network: parallel)
    message = refusal(
        "TrainOneStepCell", "parallel", "'auto' or DataParallel()", repr(kind), "Others shard the sums or the state."
    )
    with pytest.raises(ValueError, match=whole(message)):
        build(parallel=kind)
