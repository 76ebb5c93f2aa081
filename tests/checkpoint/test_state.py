"""States of a training step and a loop: what goes on from them is what would have gone on without."""

import random

import mindspore as ms
import numpy as np
import pytest
from linear_toy import line, mse, sgd, toy_step, weight_of
from mindspore import Tensor, nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.experimental import optim
from open_window import window_of
from refusal import refuses, warns
from state_probe import BATCHES, Net, bits_of, compare, new_loop, new_step, train_loop, train_step
from step_probe import sgd_step

from ms_gradaccum import HSDP, Accumulator, ClipByGlobalNorm, MixedPrecision, load_state, save_state
from ms_gradaccum._checks import DamagedState
from ms_gradaccum.backend.random_states import random_states
from ms_gradaccum.checkpoint import state
from ms_gradaccum.checkpoint.contents import Contents
from ms_gradaccum.loops.data_position import DataPosition, Sources, skipping
from ms_gradaccum.parallel.kinds import World


class Keeping(nn.Optimizer):
    """An optimizer that keeps copies in a dict, around one of which MindSpore's cells do not see all parameters."""

    def __init__(self, parameters):
        super().__init__(0.0, list(parameters))
        self.inner = optim.NAdam(self.parameters, 0.05)
        self.state = {each.name: {"average": each.clone()} for each in self.parameters}
        self.state["itself"] = self.state

    def construct(self, gradients):
        self.inner(gradients)
        for parameter, its in zip(self.parameters, self.state.values()):
            ops.assign(its["average"], 0.9 * its["average"] + 0.1 * parameter)
            ops.assign(parameter, 0.5 * (parameter + its["average"]))
        return True


pytestmark = pytest.mark.usefixtures("eager")
SETTINGS = {
    "plain": {"check_loss": True},
    "adam": {"make_optimizer": lambda p: nn.AdamWeightDecay(p, nn.cosine_decay_lr(0.0, 0.05, 8, 8, 1))},
    "experimental": {"make_optimizer": lambda p: optim.Adam(p, lr=0.05, amsgrad=True)},
    "state in dicts and lists": {"make_optimizer": Keeping},
    "clip": {"clip": ClipByGlobalNorm(0.05)},
    "scaled": {"mixed_precision": MixedPrecision(level="O0", init_scale=8, growth_interval=1)},
    "manager": {"mixed_precision": ms.amp.DynamicLossScaleManager(8, 2, 2)},
    "scaler": {"mixed_precision": ms.amp.DynamicLossScaler(8, 2, 1)},
    "drop": {"bad_micro_batch": "drop"},
}


@pytest.mark.parametrize(
    "name,batches", [*((name, 4) for name in SETTINGS), *((name, 6) for name in ("plain", "scaled"))]
)
def test_a_step_goes_on_bit_for_bit(name, batches, tmp_path):
    step = new_step(**SETTINGS[name])
    train_step(step, BATCHES[:batches])
    start = bits_of(step)
    saved = save_state(step, tmp_path)
    assert bits_of(step) == start  # saving changes nothing
    outputs, end = train_step(step, BATCHES[batches:]), bits_of(step)
    assert end != start  # otherwise this proves nothing
    fresh = new_step(**SETTINGS[name])
    assert bits_of(fresh) != start
    loaded = load_state(fresh, tmp_path)
    assert loaded == saved
    assert (loaded.batches, loaded.updates) == (batches, batches // 3)
    assert bits_of(fresh) == start
    assert train_step(fresh, BATCHES[batches:]) == outputs
    assert bits_of(fresh) == end


@pytest.mark.parametrize("name", ["plain", "experimental"])
def test_a_used_compiled_step_goes_on_from_another_ones_state(name, tmp_path, mode):
    """In PYNATIVE mode MindSpore compiles a part of the experimental one that knows the parameters by their memory."""
    step = new_step(**SETTINGS[name])
    train_step(step, BATCHES[:4])
    save_state(step, tmp_path)
    outputs, end = train_step(step, BATCHES[4:]), bits_of(step)
    train_step(step, BATCHES[:3])
    load_state(step, tmp_path)
    assert train_step(step, BATCHES[4:]) == outputs
    assert bits_of(step) == end


def test_what_a_program_sets_in_the_groups_of_an_optimizer_is_saved(tmp_path, mode):
    """In PYNATIVE mode these numbers change the training; a graph does not follow them."""

    def trained(step, batches):
        for i in batches:
            if i == 3:
                step.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.5, betas=(0.5, 0.9))
            train_step(step, BATCHES[i : i + 1])
        return bits_of(step)

    whole = trained(new_step(**SETTINGS["experimental"]), range(9))
    step = new_step(**SETTINGS["experimental"])
    trained(step, range(4))
    save_state(step, tmp_path)
    step = new_step(**SETTINGS["experimental"])
    load_state(step, tmp_path)
    assert trained(step, range(4, 9)) == whole
    groups = [{"lr": "0.1"}], [{"unknown": 0.1}], [{}, {}], [{"betas": 0.5}]
    for damaged in groups:
        with pytest.raises(DamagedState):
            window_of(step).load_state_dict({**window_of(step).state_dict(), "groups": damaged})


@pytest.mark.parametrize("scheduled,batches", [(False, 1), (False, 3), (False, 5), (True, 5), (True, 6), (True, 8)])
def test_a_loop_goes_on_bit_for_bit_with_its_data_and_its_scheduler(scheduled, batches, tmp_path):
    settings = {"schedule": {0: 2, 1: 3}} if scheduled else {"accumulation_steps": 3, "check_loss": True}
    accumulator, *data = new_loop(**settings)
    saved = train_loop(accumulator, *data, 2, save_after=batches, directory=tmp_path, extra={"note": "here"})
    straight, *its_data = new_loop(**settings)
    whole = train_loop(straight, *its_data, 2)
    assert len(whole) == 10
    fresh, *its_data = new_loop(**settings)
    loaded = load_state(fresh, tmp_path)
    assert loaded == saved and loaded.extra == {"note": "here"}
    assert loaded.epoch == batches // 5
    assert bits_of(fresh) == bits_of(accumulator)
    assert train_loop(fresh, *its_data, 2, first_epoch=loaded.epoch) == whole[batches:]
    assert bits_of(fresh) == bits_of(straight)


def loop_of(steps):
    network = line(3)
    return Accumulator(mse(network), sgd(network), steps)


@pytest.mark.parametrize("name, limit", [("clip_grad_norm", 0.05), ("clip_grad_value", 0.02)])
def test_a_loop_flushes_with_the_clip_that_it_had_before_its_state(name, limit, tmp_path):
    def flushed(accumulator):
        accumulator.flush()
        return bits_of(accumulator)

    accumulator, fresh = loop_of(2), loop_of(2)
    for x, y in BATCHES[:3]:
        accumulator.backward(x, y)
        getattr(accumulator, name)(limit)
        accumulator.step()
    save_state(accumulator, tmp_path)
    expected = flushed(accumulator)
    load_state(fresh, tmp_path)
    assert flushed(fresh) == expected
    # Without its clip, it would have been another update.
    load_state(fresh, tmp_path)
    fresh.windows[0].last_clip = None
    assert flushed(fresh) != expected


class Centred(nn.Cell):
    """A network that moves a buffer in each forward pass, and one that its state does not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(3, 1, "ones", "zeros")
        self.register_buffer("centre", Tensor(np.zeros(3, np.float32)))
        self.register_buffer("scratch", Tensor(np.zeros(3, np.float32)), persistent=False)

    def construct(self, x):
        self.centre[:] = 0.9 * self.centre + 0.1 * x.mean(0)
        self.scratch[:] = x[0]
        return self.layer(x - self.centre)


def test_buffers_go_on(tmp_path):
    network, its_network = Centred(), Centred()
    step, fresh = (sgd_step(mse(each), 2, 0.02, accumulation_steps=3) for each in (network, its_network))
    train_step(step, BATCHES[:4])
    save_state(step, tmp_path)
    assert network.centre.asnumpy().all()  # else it would prove nothing
    outputs = train_step(step, BATCHES[4:])
    load_state(fresh, tmp_path)
    assert not its_network.scratch.asnumpy().any()
    assert train_step(fresh, BATCHES[4:]) == outputs
    assert (its_network.centre.asnumpy() == network.centre.asnumpy()).all()


def test_networks_and_optimizers_with_the_same_names_keep_their_own(tmp_path):
    def build():
        ms.set_seed(1)
        networks = [Net(), Net()]
        optimizers = [nn.Momentum(each.trainable_params(), 0.1 * (i + 1), 0.9) for i, each in enumerate(networks)]
        cells = [mse(each) for each in networks]
        return Accumulator(cells, optimizers, 2), cells

    def train(accumulator, cells, batches):
        for x, y in batches:
            with accumulator.accumulate():
                accumulator.backward(x, y, network=cells[0])
                accumulator.backward(x, 2 * y, network=cells[1])
                accumulator.step()

    accumulator, cells = build()
    fresh, its_cells = build()
    train(accumulator, cells, BATCHES[:3])
    save_state(accumulator, tmp_path)
    load_state(fresh, tmp_path)
    train(accumulator, cells, BATCHES[3:6])
    train(fresh, its_cells, BATCHES[3:6])
    assert bits_of(fresh) == bits_of(accumulator)


def test_random_numbers_go_on(tmp_path):
    def numbers():
        return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), str(ms.get_rng_state())]

    step = new_step()
    random.seed(5), np.random.seed(5), ms.manual_seed(5)
    random.gauss(0, 1), np.random.normal()  # one of a pair each: the other one waits
    save_state(step, tmp_path)
    expected = numbers()
    ms.manual_seed(6)
    load_state(step, tmp_path)
    assert numbers() == expected


def test_mindspore_reads_the_tensors(tmp_path):
    step = new_step()
    train_step(step, BATCHES[:4])
    saved = save_state(step, tmp_path)
    tensors = ms.load_checkpoint(str(saved.path / "parameters-00000.safetensors"), format="safetensors")
    other = Net()
    assert ms.load_param_into_net(other, tensors)[0] == []
    compare(other.trainable_params(), step.network.trainable_params())
    whole = ms.load_checkpoint(str(saved.path / "rank_0" / "parameters-00000.safetensors"), format="safetensors")
    first = step.network.trainable_params()[0].name
    sums = {f"accu_grads.{weight.name}" for weight in step.network.trainable_params()}
    assert set(whole) == sums | {f"accu_grads.{first}.window_loss", f"accu_grads.{first}.window_weight"}


def test_only_the_last_states_are_kept(tmp_path):
    step = new_step()
    names = [save_state(step, tmp_path / "states", keep_checkpoint_max=2).path.name for _ in range(4)]
    assert names == ["state-000001", "state-000002", "state-000003", "state-000004"]
    assert sorted(path.name for path in (tmp_path / "states").glob("state-*")) == names[2:]
    assert load_state(step, tmp_path / "states").path.name == names[3]
    assert load_state(step, tmp_path / "states" / names[2]).path.name == names[2]


def test_a_hundred_overflows_in_a_row_end_the_training(tmp_path):
    def train(step, target, windows):
        for _ in range(windows):
            step(Tensor([[1.0]]), Tensor([[target]]))

    (network, step), (resumed, fresh) = (
        toy_step(mixed_precision=MixedPrecision(level="O0", init_scale=8)) for _ in range(2)
    )
    train(step, np.nan, 9)
    train(step, 2.0, 1)  # one good window begins the count anew
    train(step, np.inf, 60)
    save_state(step, tmp_path)
    load_state(fresh, tmp_path)
    train(fresh, np.nan, 39)
    with refuses(RuntimeError, "Inf or NaN"):
        train(fresh, np.nan, 1)
    assert weight_of(resumed) == weight_of(network)
    assert fresh.events.updates == 1


class Shuffled:
    """Draws its order when a pass begins, from NumPy's generator."""

    def __len__(self):
        return 5

    def __iter__(self):
        return (BATCHES[i] for i in np.random.permutation(5))


def test_python_data_goes_on_where_it_was(tmp_path):
    def train(accumulator, data, first_epoch=0, save_after=None):
        seen = []
        for _ in range(first_epoch, 3):
            for x, y in data:
                accumulator.backward(x, y)
                accumulator.flush()
                seen.append([x.asnumpy().tolist(), np.random.rand()])
                if len(seen) == save_after:
                    save_state(accumulator, tmp_path)
                    return seen
        return seen

    def build(seed):
        np.random.seed(seed)
        accumulator = loop_of(9)
        return accumulator, accumulator.prepare(Shuffled())

    whole = train(*build(1))
    first = train(*build(1), save_after=7)
    accumulator, data = build(99)
    load_state(accumulator, tmp_path)
    # As a program does that is ended before it has taken a batch.
    save_state(accumulator, tmp_path)
    accumulator, data = build(100)
    rest = train(accumulator, data, load_state(accumulator, tmp_path).epoch)
    assert first + rest == whole


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_not_saved_keeps_its_random_generators(rank, tmp_path):
    train_loop(*new_loop(), 1, save_after=2, directory=tmp_path)
    saved = random_states()
    accumulator, *_ = new_loop()
    ms.set_seed(7)
    own = random_states()
    contents, world = Contents(accumulator), World(rank, 2)
    _, found, (place,), _ = state._load_numbers(contents, world, state._choose(tmp_path))
    # At once, and after the first batch of the resumed pass, whose order is that of the saved one.
    assert found == place.random_now == (own if rank == 1 else saved) and own["numpy"] != saved["numpy"]


@pytest.mark.parametrize("ranks,now", [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_other_ranks_go_on_with_the_samples_that_are_left(ranks, now):
    def batches(rank, of, taken=0):
        data = NumpySlicesDataset(np.arange(48), num_shards=of, shard_id=rank, shuffle=True).batch(2)
        with skipping(data, taken):
            iterator = data.create_tuple_iterator(num_epochs=1, output_numpy=True)
        return [rows.tolist() for (rows,) in iterator]

    taken = 4
    seen = [row for rank in range(ranks) for rows in batches(rank, ranks)[:taken] for row in rows]
    place = DataPosition(0, taken, 24 // ranks, None, ranks).among(24 // now, now)
    rest = [row for rank in range(now) for rows in batches(rank, now, place.batches) for row in rows]
    assert sorted(seen + rest) == list(range(48))
    # A place that other ranks cannot have is before it.
    assert DataPosition(0, 3, 12, None, 2).among(6, 4).batches == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_without_a_seed_is_dealt_among_the_ranks_as_ever(ranks):
    def rows(rank, shards):
        data = NumpySlicesDataset(np.arange(48), num_shards=shards, shard_id=rank, shuffle=True).batch(2)
        sources = Sources.now(ranks)
        sources.check_known(data, ranks)
        with sources.begun(data, None):
            batches = data.create_tuple_iterator(num_epochs=1, output_numpy=True)
        return [row for (batch,) in batches for row in batch.tolist()]

    if ranks == 1:
        assert rows(None, None) != rows(None, None)
    else:
        assert sorted(rows(0, 2) + rows(1, 2)) == list(range(48))


def test_an_order_that_nobody_knows_is_told():
    rows = np.arange(48)
    shuffled = NumpySlicesDataset(rows, shuffle=True)
    dealt = NumpySlicesDataset(rows, shuffle=True, num_shards=2, shard_id=0)
    in_order = NumpySlicesDataset(rows, shuffle=False)
    for data in (shuffled.batch(2), dealt.shuffle(9).batch(2), in_order.shuffle(9)):
        with warns("its own random seed"):
            Sources.now(2).check_known(data, 2)
        Sources.now(1).check_known(data, 1)
    for data in (dealt.batch(2), in_order.batch(2), BATCHES):
        Sources.now(2).check_known(data, 2)


def test_hsdp_alone_is_one_process(tmp_path):
    step = new_step(parallel=HSDP())
    train_step(step, BATCHES[:4])
    save_state(step, tmp_path)
    fresh = new_step()
    load_state(fresh, tmp_path)
    assert bits_of(fresh) == bits_of(step)
