"""MindSpore's own callbacks under Model, and what a user's callback finds there."""

import os
import re
import signal
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from linear_toy import ALL, AtStep, Recorder, X, batches, descend, line, mse, toy, toy_step, weight_of
from mindspore import Tensor, amp, experimental, nn, ops, train
from refusal import refuses

from ms_gradaccum import ClipByGlobalNorm, Model, StepOutput

pytestmark = pytest.mark.usefixtures("eager")


def loss_of(weight, *rows):
    return np.mean([(2 * x - weight * x) ** 2 for x in rows])


def test_a_callback_finds_the_report_the_optimizer_and_the_training_cell(mode):
    found = []

    def note(run_context):
        params = run_context.original_args()
        found.append((params.net_outputs, params.optimizer, params.train_network))

    network, model = toy(accumulation_steps=2, clip=ClipByGlobalNorm(10.0))
    model.train(1, batches(4), [AtStep(note)])
    (inside, *_), (end, optimizer, train_network) = found
    inside, end = inside._asdict(), end._asdict()
    assert optimizer is train_network.optimizer and train_network is model.train_network
    assert tuple(inside) == tuple(end) == StepOutput._fields
    assert all(isinstance(item, Tensor) for item in (*inside.values(), *end.values()))
    # What only an update can tell is NaN inside a window. The gradient at weight 0 is 4 * mean(x * x) = 102.
    unknown = (float("nan"),) * 3
    report = [[item.asnumpy().item() for item in output.values()] for output in (inside, end)]
    assert report[0] == pytest.approx([loss_of(0, *ALL[:4]), False, 1, False, *unknown, 4], nan_ok=True)
    assert report[1] == pytest.approx([loss_of(0, *ALL), False, 1, True, 102, 10, 0.02, 8], rel=1e-5)


def test_loss_monitor_prints_the_mean_over_the_rows_of_the_window(mode, capsys):
    network, model = toy(micro_size=2, accumulation_steps=2)
    model.train(1, batches(3), [train.LossMonitor(), train.TimeMonitor()])
    printed = capsys.readouterr().out
    lines = re.findall(r"epoch: 1 step: (\d), loss is (\S+)", printed)
    weight = descend(ALL[:6])
    losses = [loss_of(0, *ALL[:3]), loss_of(0, *ALL[:6]), loss_of(weight, 7, 8)]
    assert [step for step, _ in lines] == ["1", "2", "3"]
    assert [float(loss) for _, loss in lines] == pytest.approx(losses, rel=1e-5)
    assert re.search(r"epoch time: \S+ ms, per step time: \S+ ms", printed)


@pytest.mark.parametrize("last_window", ["apply", "carry"])
def test_loss_monitor_ends_the_training_at_an_invalid_loss(last_window):
    rows = X.copy()
    rows[3] = np.nan
    network, model = toy(accumulation_steps=3, last_window=last_window)
    with refuses(ValueError, "ends the training"):
        model.train(1, batches(2, rows), train.LossMonitor())
    assert weight_of(network) == 0
    # What the bad rows left in the window would end each later training too.
    model.train(1, batches(2), train.LossMonitor())
    assert np.isfinite(weight_of(network)) and weight_of(network) > 0


def test_learning_rate_scheduler_sets_the_rate_of_the_next_update(mode):
    network, model = toy(accumulation_steps=2)
    # Its step counter counts batches: two to a window.
    model.train(1, batches(2), train.LearningRateScheduler(lambda rate, step: 0.02 if step < 2 else 0.01))
    assert weight_of(network) == pytest.approx(descend(ALL[4:], weight=descend(ALL[:4]), learning_rate=0.01))


def momentum_model(**settings):
    """A model whose optimizer has a state that a continued run needs."""
    network = line()
    optimizer = nn.Momentum(network.trainable_params(), 0.005, 0.9)
    return network, Model(mse(network), optimizer=optimizer, **settings)


@pytest.mark.parametrize("last_window, open_batches", [("apply", 0), ("drop", 0), ("carry", 1)])
def test_a_run_continued_from_a_checkpoint_equals_the_uninterrupted_one(last_window, open_batches, tmp_path):
    settings = {"accumulation_steps": 3, "last_window": last_window}
    network, model = momentum_model(**settings)
    recorder = Recorder()
    config = train.CheckpointConfig(save_checkpoint_steps=4, keep_checkpoint_max=9, append_info=["epoch_num"])
    model.train(3, batches(2), [train.ModelCheckpoint("toy", str(tmp_path), config), recorder])

    checkpoint = ms.load_checkpoint(str(tmp_path / "toy-1_4.ckpt"))
    assert checkpoint["weight"].asnumpy().item() == recorder.weights[3]
    resumed_network, resumed = momentum_model(**settings)
    missing, _ = ms.load_param_into_net(resumed.train_network, checkpoint)
    assert missing == []
    assert resumed.train_network.open_batches() == open_batches
    resumed.train(3, batches(2), initial_epoch=int(checkpoint["epoch_num"].asnumpy()))
    assert weight_of(resumed_network) == weight_of(network)


def test_backup_and_restore_goes_on_from_its_backup(tmp_path):
    for epochs in (1, 3):
        network, model = toy(accumulation_steps=2)
        model.train(1, batches(4), train.BackupAndRestore(str(tmp_path), delete_checkpoint=epochs == 3))
        assert weight_of(network) == pytest.approx(descend(*[ALL] * (epochs // 2 + 1)))
    assert not list(tmp_path.iterdir())


def test_summary_collector_collects(tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)  # where it looks for a graph too
    network, model = toy(accumulation_steps=2)
    model.train(1, batches(4), train.SummaryCollector(str(tmp_path), collect_freq=1))
    assert weight_of(network) == pytest.approx(2.04)
    (events,) = tmp_path.glob("*_MS")
    assert b"loss" in events.read_bytes()


@pytest.fixture
def restored_signal():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate(run_context):
    """Stop the process in the second batch, as a scheduler does that wants its machine back."""
    if run_context.original_args().cur_step_num == 2:
        os.kill(os.getpid(), signal.SIGTERM)


TERMINATE = train.LambdaCallback(on_train_step_begin=terminate)


def test_on_request_exit_saves_the_weights_and_the_graph(restored_signal, tmp_path):
    network, model = toy(accumulation_steps=3)
    model.train(1, batches(2), [TERMINATE, train.OnRequestExit(file_name="toy", directory=str(tmp_path))])
    saved = ms.load_checkpoint(str(tmp_path / "rank_0" / "toy_train.ckpt"))
    assert saved["weight"].asnumpy().item() == weight_of(network) == pytest.approx(2.9912)
    assert (tmp_path / "rank_0" / "toy_train.mindir").exists()


def test_a_graceful_exit_saves_the_open_window_and_stops(restored_signal, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("MS_ENABLE_GRACEFUL_EXIT", "1")  # It is read when both are built.
        _, model = toy(accumulation_steps=3, last_window="carry")
        exits = train.OnRequestExit(save_mindir=False, file_name="toy", directory=str(tmp_path))
    recorder = Recorder()
    model.train(5, batches(2), [TERMINATE, exits, recorder])
    # The signal arrives in the second batch: it ends there or, noticed at the start of a batch, in the third.
    batches_done = len(recorder.outputs)
    assert batches_done in (2, 3)
    saved = ms.load_checkpoint(str(tmp_path / "rank_0" / "toy_train.ckpt"))
    network, model = toy(accumulation_steps=3, last_window="carry")
    ms.load_param_into_net(model.train_network, saved)
    assert model.train_network.open_batches() == batches_done % 3
    model.train(1, batches(2).skip(batches_done))
    assert weight_of(network) == pytest.approx(1.2133333)


def test_a_callback_finds_the_loss_scale_manager():
    manager, scales = amp.DynamicLossScaleManager(2.0**20, scale_window=1), []
    _, model = toy(loss_scale_manager=manager)
    noting = AtStep(lambda context: scales.append(context.original_args().loss_scale_mananger.get_loss_scale()))
    model.train(1, batches(4), noting)
    assert scales == [2.0**21, 2.0**22]


def test_an_attribute_that_is_no_method_is_not_called():
    network, step = toy_step()
    ends = []
    step.add_callback(SimpleNamespace(on_update_begin=None, on_update_end=ends.append))
    step(Tensor(X), Tensor(2 * X))
    assert len(ends) == 1 and weight_of(network) == pytest.approx(2.04)


def test_an_optimizer_may_have_a_number_of_that_name():
    class Counting(experimental.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.02})
            self.global_step = 0

        def construct(self, grads):
            for parameter, grad in zip(self.parameters, grads, strict=True):
                ops.assign_sub(parameter, 0.02 * grad)
            return True

    network = line()
    Model(network, nn.MSELoss(), Counting(network.trainable_params())).train(1, batches(8))
    assert weight_of(network) == pytest.approx(descend(ALL))
