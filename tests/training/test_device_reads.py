"""The cost of a batch on the host: calls of Python, and reads of the device, which only an update needs."""

from contextlib import contextmanager

import mindspore as ms
import pytest
from linear_toy import X, line, mse, sgd, toy_step, weight_of
from loop_toy import FOUR
from mindspore import Tensor
from package_files import counts_of, seen
from refusal import by_loop
from step_probe import Around, tensors

from ms_gradaccum import GradAccumulation, MixedPrecision
from ms_gradaccum.advice.window_watch import WATCHED_WINDOWS

BATCH = tensors(X, 2 * X)
# All that bring a value to the host. A batch, which is cut there, is no value of the device.
READS = ("asnumpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def counted(monkeypatch):
    """Yield a list of the reads in this context. A read by a read counts once."""
    reads, inside = [], []

    def counting(name, method):
        def read(tensor, *args):
            if not inside and not any(tensor is each for each in BATCH):
                reads.append(name)
            inside.append(name)
            try:
                return method(tensor, *args)
            finally:
                inside.pop()

        return read

    with monkeypatch.context() as patches:
        for name in READS:
            patches.setattr(Tensor, name, counting(name, getattr(Tensor, name)))
        yield reads


def trained_by_step(accumulation_steps, micro_size, **settings):
    _, step = toy_step(micro_size, 1e-3, accumulation_steps=accumulation_steps, check_loss=False, **settings)
    return lambda: step(*BATCH)


def trained_by_loop(accumulation_steps, micro_size, **settings):
    network = line()
    loss_cell = GradAccumulation(mse(network), micro_size)
    return by_loop(
        loss_cell, sgd(network, 1e-3), *BATCH, accumulation_steps=accumulation_steps, check_loss=False, **settings
    )


@pytest.mark.parametrize("build", [trained_by_step, trained_by_loop])
@pytest.mark.parametrize(
    ("accumulation_steps", "micro_size", "settings"),
    [(1, 4, {}), (4, 1, {}), (3, 2, {"mixed_precision": MixedPrecision("float16", init_scale=2.0)})],
    ids=["micro batches", "batches", "loss scale"],
)
def test_an_update_reads_the_device_twice_and_a_batch_never(
    build, accumulation_steps, micro_size, settings, monkeypatch, mode
):
    batch = build(accumulation_steps, micro_size, **settings)
    # The first windows look at the learning rate, too.
    for _ in range(WATCHED_WINDOWS * accumulation_steps):
        batch()
    for _ in range(2):
        for is_last in [False] * (accumulation_steps - 1) + [True]:
            with counted(monkeypatch) as reads:
                batch()
            assert len(reads) <= (2 if is_last else 0), reads
    assert reads  # Else nothing has been counted.


@pytest.mark.parametrize("how", ["load_param_into_net", "assign_value", "set_data", "graph"])
def test_the_number_of_batches_is_that_of_whoever_wrote_it_last(how, tmp_path):
    _, saved = toy_step(accumulation_steps=4)
    for each in FOUR[:3]:
        saved(*each)
    ms.save_checkpoint(saved, str(tmp_path / "middle.ckpt"))
    network, step = toy_step(accumulation_steps=4)
    step(*FOUR[3])  # Now it knows that there is one batch.
    if how == "graph":
        as_graph = Around(step)
        as_graph(*FOUR[3])
        as_graph(*FOUR[3])
    elif how == "load_param_into_net":
        ms.load_param_into_net(step, ms.load_checkpoint(str(tmp_path / "middle.ckpt")))
    else:
        for ours, its in zip(step.get_parameters(), saved.get_parameters()):
            getattr(ours, how)(Tensor(its.asnumpy()))
    assert step(*FOUR[3]).updated and step.open_batches() == 0
    if how != "graph":
        assert weight_of(network) == pytest.approx(2.04)


def test_a_batch_in_graph_mode_takes_few_calls_in_few_files():
    ms.set_context(mode=ms.GRAPH_MODE)
    _, step = toy_step(4, check_loss=False)
    for _ in range(WATCHED_WINDOWS):
        step(*BATCH)
    with seen() as calls:
        step(*BATCH)
    files, functions, number_of_calls, changes = counts_of(calls)
    assert files <= 9 and functions <= 45 and changes <= 30
    # At least one for each graph: four micro steps, the report and the update.
    assert 6 < number_of_calls <= 58
