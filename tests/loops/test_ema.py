"""EMA: averages that move once per update, by the formulas of mindcv and mindone, and are kept wherever weights are."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import ALL, batches, descend, line, mse, sgd, toy, toy_step, toy_with_metrics, weight_of
from mindspore import Parameter, Tensor, nn, ops, train
from open_window import window_of
from refusal import refuses
from state_probe import BATCHES, new_loop, new_step
from step_probe import Weights

from ms_gradaccum import EMA, Accumulator, MixedPrecision, StateCheckpoint, TrainOneStepCell, load_state, save_state
from ms_gradaccum.backend import tensors


def peers_average(weights, decay=0.9999, temperature=2000, start=0.0):
    """Return the averages of mindcv and mindone in float64; `weights` are those after each update."""
    average = np.asarray(start, np.float64)
    for update, weight in enumerate(weights, 1):
        factor = decay * (1 - np.exp(-update / temperature)) if temperature else decay
        average = average * factor + np.asarray(weight, np.float64) * (1 - factor)
    return average


def values(parameters):
    return [parameter.asnumpy().copy() for parameter in parameters]


def watched(*args, step=None, **settings):
    step = new_step() if step is None else step
    ema = EMA(*args, **settings)
    step.add_callback(ema)
    return step, ema


def assert_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "mode,decay,warmup",
    [(ms.GRAPH_MODE, 0.9999, 2000), (ms.PYNATIVE_MODE, 0.9, 2), (ms.GRAPH_MODE, 0.5, 0)],
    indirect=["mode"],
)
def test_an_update_moves_the_averages_as_in_mindcv_and_mindone(mode, decay, warmup, monkeypatch):
    """Accumulate over three batches in float16, whose first windows overflow: neither batches nor these count."""
    if warmup == 0:  # One run of tensors after the other.
        monkeypatch.setattr(tensors, "_FEW", 1)
        monkeypatch.setattr(tensors, "_COMPILED", 1)
    precision = MixedPrecision(ms.float16, "O1", init_scale=2.0**18, backoff_factor=2.0**-4)
    settings = {} if warmup == 2000 else {"decay": decay, "warmup_updates": warmup}
    step, ema = watched(step=new_step(mixed_precision=precision), **settings)
    assert (len(ema.tensor_chunks) > 2) == (warmup == 0)
    weights = step.network.trainable_params()
    start, seen, skipped = values(weights), [], 0
    for batch in (BATCHES * 2)[:18]:
        output = step(*batch)
        skipped += bool(output.overflow.asnumpy())
        if output.is_updated:
            seen.append(values(weights))
    assert skipped >= 1 and len(seen) >= 3 and skipped + len(seen) == 6
    assert ema.updates == len(seen)
    for average, begun, *each in zip(ema.parameters, start, *seen):
        # As close as float32 is, and far nearer than the averages of a wrong count would be.
        np.testing.assert_allclose(average.asnumpy(), peers_average(each, decay, warmup, begun), 2e-6, 1e-7)
    moved = [np.abs(average.asnumpy() - weight.asnumpy()).max() for average, weight in zip(ema.parameters, weights)]
    assert max(moved) > (1e-5 if warmup == 2000 else 1e-2)


def test_an_update_waits_for_the_device_once(eager, monkeypatch):
    step, _ = watched(step=new_step(accumulation_steps=1))
    read, asnumpy = [], Tensor.asnumpy
    monkeypatch.setattr(Parameter, "asnumpy", lambda parameter: read.append(parameter.name) or asnumpy(parameter))
    for batch in BATCHES[:3]:
        step(*batch)
    assert [name for name in read if name.startswith("ema.")] == ["ema.updates"] * 3


def test_averages_of_float16_weights_are_float32_and_swap_exactly(mode):
    network = Weights(1, ms.float16)
    step, ema = watched(0.9, step=TrainOneStepCell(network, nn.SGD([network.weight], 0.0625)), warmup_updates=0)
    seen = []
    for number in (1.0009765625, 3.0, 2.0):
        step(Tensor([[number]], ms.float16))
        seen.append(weight_of(network))
    average, weight = ema.parameters[0].asnumpy(), network.weight.asnumpy().copy()
    assert average.dtype == np.float32
    expected = peers_average(seen, 0.9, 0)
    np.testing.assert_allclose(average.item(), expected, 1e-6)
    assert abs(np.float16(expected) - expected) > 1e-6  # Else float16 averages would do.
    with ema.swapped():
        assert network.weight.dtype == ms.float16
        assert network.weight.asnumpy() == average.astype(np.float16) != weight
    assert_bits([network.weight.asnumpy(), ema.parameters[0].asnumpy()], [weight, average])


def test_swapped_gives_the_averages_to_compiled_evaluation_and_trains_on_as_if_not(mode):
    network, model = toy_with_metrics(accumulation_steps=4)
    ema = EMA(0.5, warmup_updates=0)
    model.train(2, batches(2), callbacks=ema)
    weight = weight_of(network)
    expected = peers_average([descend(ALL), descend(ALL, ALL)], 0.5, 0)
    for _ in range(2):
        with ema.swapped():
            assert abs(weight_of(network) - expected) < 1e-6
            assert abs(model.eval(batches(8))["mse"] - 25.5 * (2 - expected) ** 2) < 1e-3
        assert weight_of(network) == weight
        assert abs(model.eval(batches(8))["mse"] - 25.5 * (2 - weight) ** 2) < 1e-3
    model.train(1, batches(2), callbacks=ema)
    assert abs(weight_of(network) - descend(ALL, ALL, ALL)) < 1e-6
    expected = peers_average([descend(*[ALL] * n) for n in (1, 2, 3)], 0.5, 0)
    assert abs(ema.parameters[0].asnumpy().item() - expected) < 1e-6


def test_a_swap_that_is_interrupted_leaves_the_weights(eager, monkeypatch):
    network, model = toy(accumulation_steps=4)
    ema = EMA(0.5, warmup_updates=0)
    model.train(1, batches(2), callbacks=ema)
    weight, assign = weight_of(network), ops.assign

    def interrupted(target, value):
        monkeypatch.setattr(ops, "assign", assign)
        assign(target, value)
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "assign", interrupted)
    with pytest.raises(KeyboardInterrupt), ema.swapped():
        pass
    assert weight_of(network) == weight
    with pytest.raises(KeyError), ema.swapped():
        raise KeyError
    assert weight_of(network) == weight
    model.train(1, batches(2), callbacks=ema)


class Fails(train.Callback):
    def on_eval_step_end(self, run_context):
        raise KeyError("stop")


def test_fit_evaluates_the_averages(eager):
    network, model = toy_with_metrics(accumulation_steps=4)
    ema, history = EMA(0.5, warmup_updates=0), train.History()
    model.fit(2, batches(2), batches(8), callbacks=[ema, history])
    weights = [descend(ALL), descend(ALL, ALL)]
    averages = [peers_average(weights[:n], 0.5, 0) for n in (1, 2)]
    mse_of = [25.5 * (2 - w) ** 2 for w in averages]
    np.testing.assert_allclose(history.history["mse"], mse_of, 1e-3)
    assert abs(weight_of(network) - weights[-1]) < 1e-6
    np.testing.assert_allclose(model.eval(batches(8), callbacks=ema)["mse"], history.history["mse"][-1], 1e-6)
    with ema.swapped():
        np.testing.assert_allclose(model.eval(batches(8), callbacks=ema)["mse"], mse_of[-1], 1e-3)
        assert abs(weight_of(network) - averages[-1]) < 1e-6  # What the evaluation has found, it leaves.
    assert abs(weight_of(network) - weights[-1]) < 1e-6
    with pytest.raises(KeyError):
        model.fit(1, batches(2), batches(8), callbacks=[ema, Fails()])
    assert abs(weight_of(network) - descend(ALL, ALL, ALL)) < 1e-6


def test_a_checkpoint_has_them_and_they_go_on_from_it(tmp_path, eager):
    """Through ModelCheckpoint and MindSpore's own loading, as the same training without a break."""
    expected, ema, resumed = (EMA(0.9, warmup_updates=3) for _ in range(3))
    unbroken, model, fresh = (toy(accumulation_steps=4)[1] for _ in range(3))
    unbroken.train(4, batches(2), callbacks=expected)
    config = train.CheckpointConfig(save_checkpoint_steps=4)
    model.train(2, batches(2), callbacks=[ema, train.ModelCheckpoint("run", str(tmp_path), config)])
    file = next(tmp_path.glob("*-2_4.ckpt"))
    saved = ms.load_checkpoint(str(file))
    assert saved["ema.updates"].asnumpy() == 2
    assert saved["ema.weight"].asnumpy() == ema.parameters[0].asnumpy() != saved["weight"].asnumpy()
    fresh.train_network.add_callback(resumed)
    assert ms.load_param_into_net(fresh.train_network, saved) == ([], [])
    assert_bits(values(resumed.parameters), [saved["ema.weight"].asnumpy()])
    fresh.train(2, batches(2), callbacks=resumed)
    assert resumed.updates == 4  # Once per update, although it was given twice.
    assert_bits(values(resumed.parameters), values(expected.parameters))


def test_a_state_in_mid_window_goes_on_bit_for_bit(tmp_path, eager):
    (step, ema), (fresh, other) = (watched(0.9, warmup_updates=3, trainable_only=False) for _ in range(2))
    for batch in BATCHES[:5]:
        step(*batch)
    assert step.open_batches() == 2 and ema.updates == 1
    save_state(step, tmp_path)
    load_state(fresh, tmp_path)
    assert_bits(values(other.parameters), values(ema.parameters))
    for each in (step, fresh):
        for batch in BATCHES[5:]:
            each(*batch)
    assert ema.updates == other.updates == 3
    assert_bits(values(other.parameters), values(ema.parameters))
    # BatchNorm's statistics are averaged, too.
    names = [parameter.name for parameter in ema.parameters]
    assert "ema.norm.moving_mean" in names and "ema.norm.gamma" in names
    assert not np.array_equal(
        ema.parameters[names.index("ema.norm.moving_mean")].asnumpy(),
        step.network.parameters_dict()["norm.moving_mean"].asnumpy(),
    )


def test_a_state_must_be_loaded_with_the_averages_that_it_was_saved_with(tmp_path, eager):
    step, _ = watched()
    save_state(step, tmp_path / "with")
    with refuses(ValueError, "also has ema.first.bias", "Nothing was changed"):
        load_state(new_step(), tmp_path / "with")
    save_state(new_step(), tmp_path / "without")
    with pytest.raises(ValueError, match="lacks ema.first.bias, "):
        load_state(step, tmp_path / "without")


def test_a_model_resumes_with_them(tmp_path, eager):
    def trained(epochs):
        network, model = toy(accumulation_steps=4)
        ema = EMA(0.9, warmup_updates=3)
        model.train(epochs, batches(2), callbacks=[StateCheckpoint(tmp_path), ema], resume=True)
        return ema

    trained(1)
    ema = trained(3)
    assert ema.updates == 3
    expected = peers_average([descend(*[ALL] * n) for n in (1, 2, 3)], 0.9, 3)
    assert abs(ema.parameters[0].asnumpy().item() - expected) < 1e-6


@pytest.mark.parametrize("looks", [False, True])
def test_averages_begin_with_the_weights_of_the_first_update(looks, eager):
    """Not with those of the time when the step was built: a checkpoint is loaded in between."""
    network, step = toy_step(4)
    ema = EMA(0.5, warmup_updates=0)
    for _ in range(2):  # Once or twice is the same.
        step.add_callback(ema)
    ms.load_param_into_net(network, {"weight": Parameter(Tensor([[1.5]], ms.float32))})
    if looks:
        with ema.swapped():
            assert weight_of(network) == 1.5
    x = ops.arange(1, 9).float().reshape(8, 1)
    step(x, 2 * x)
    weight = descend(ALL, weight=1.5)
    assert abs(ema.parameters[0].asnumpy().item() - (1.5 + weight) / 2) < 1e-6
    assert ema.updates == 1


def test_nothing_else_happens_while_the_averages_are_in_the_network(tmp_path, eager):
    step, ema = watched(0.5)
    step(*BATCHES[0])
    save_state(step, tmp_path)

    def swap():
        with ema.swapped():
            pass

    with ema.swapped():
        saving = [lambda: save_state(step, tmp_path), lambda: load_state(step, tmp_path)]
        for work in (lambda: step(*BATCHES[1]), step.flush, swap, *saving):
            with refuses(RuntimeError, "Leave ema.swapped() first"):
                work()
    assert len(list(tmp_path.glob("state-*"))) == 1
    # Nor does a training without them, whose averages it would train.
    _, model = toy()
    ema = EMA(0.5)
    model.train(1, batches(8), callbacks=[ema])
    with ema.swapped(), refuses(RuntimeError, "Leave ema.swapped() first"):
        model.train(1, batches(8))
    model.train(1, batches(8))


def test_what_it_cannot_average_is_refused(eager):
    step = new_step()
    ema = EMA()
    with refuses(RuntimeError, "training step"), ema.swapped():
        pass
    with refuses(ValueError, "training step"):
        train.Model(step).train(1, batches(8), callbacks=ema)
    step.add_callback(ema)
    for again in (lambda: step.add_callback(EMA()), lambda: new_step().add_callback(ema)):
        with refuses(ValueError, "EMA or step"):
            again()
    cells = [mse(line()) for _ in range(2)]
    with refuses(ValueError, "Accumulator of several"):
        Accumulator(cells, [sgd(cell) for cell in cells]).add_callback(EMA())
    _, model = toy_with_metrics()
    model.train(1, batches(8), callbacks=(ema := EMA()))
    _, other = toy_with_metrics()
    with refuses(ValueError, "'eval_network'"):
        other.eval(batches(8), callbacks=ema)
    with refuses(RuntimeError, "training step"):
        other.eval(batches(8), callbacks=EMA())
    other.train_network.network.set_grad(False)
    for weight in other.train_network.network.get_parameters():
        weight.requires_grad = False
    with refuses(ValueError, "parameters to average"):
        other.train(1, batches(8), callbacks=EMA())


def test_a_sink_of_several_batches_is_refused(eager):
    """The callback would hear of only one update. The CPU has no data sink mode, so it is told of one."""
    step, ema = watched()
    params = train.callback._callback.InternalCallbackParam()
    params.update(train_network=step, dataset_sink_mode=True, sink_size=4)
    with refuses(ValueError, "'sink_size'"):
        ema.on_train_begin(train.RunContext(params))
    params.sink_size = 1
    ema.on_train_begin(train.RunContext(params))


@pytest.mark.parametrize("new", [new_step, lambda: new_loop()[0]], ids=["step", "loop"])
def test_the_averages_are_those_of_the_trainable_parameters_and_a_cell_around_the_step_has_them(new, eager):
    """As in data sink mode, where MindSpore puts a cell around the step and saves its parameters."""
    trained = new()
    network = window_of(trained).network
    next(network.get_parameters()).requires_grad = False
    trained, ema = watched(step=trained)
    trained.add_callback(ema)
    assert [*trained.extras] == [ema]
    assert [each.name for each in ema.parameters] == [f"ema.{each.name}" for each in network.trainable_params()]
    around = nn.CellList([trained], auto_prefix=False)
    for cell in (trained, around):
        names = [parameter.name for parameter in cell.get_parameters()]
        assert all(names.count(average.name) == 1 for average in [*ema.parameters, ema.count])
        assert {each.name for each in cell.trainable_params()}.isdisjoint(each.name for each in ema.parameters)
