"""Settings that a GradCacheLoss cannot be trained with raise a clear error, mostly before anything is trained."""

from types import SimpleNamespace

import mindspore as ms
import pytest
from linear_toy import sgd
from mindspore import Tensor, nn, ops
from mindspore.parallel.auto_parallel import AutoParallel
from refusal import refuses
from step_probe import Around, Of, sgd_step
from whole_batch_losses import Clip, Correlation, OrdinaryLoss, Tower, Towers, batch, parts_of

from ms_gradaccum import GradAccumulation, GradCacheLoss, TrainOneStepCell, verify
from ms_gradaccum.contrastive.cache_pass import CachePass, random_cells
from ms_gradaccum.parallel.semi_auto import SemiAuto
from ms_gradaccum.static_graph.settings import check_step

pytestmark = pytest.mark.usefixtures("eager")


def cell():
    return GradCacheLoss(*parts_of("correlation"))


class Own(GradCacheLoss):
    def construct(self, *inputs):
        return self.loss_fn(*self.outputs(inputs)) * 2


REFUSED = {
    "backbone": (lambda: GradCacheLoss("a network", Clip()), TypeError, "'backbone'"),
    "loss_fn": (lambda: GradCacheLoss(Towers(), None), TypeError, "'loss_fn'"),
    "labels": (lambda: GradCacheLoss(Towers(), Clip(), labels=-1), ValueError, "'labels'"),
    "construct": (lambda: Own(Towers(), Clip()), TypeError, "construct() of Own"),
    "weighted": (lambda: GradAccumulation(cell(), 2, weighted=True), ValueError, "'weighted'"),
    "losses": (lambda: GradAccumulation(cell(), 2, losses="first"), ValueError, "'losses'"),
    "one inside": (
        lambda: GradAccumulation(OrdinaryLoss(cell(), Correlation(), 1), 2),
        ValueError,
        "GradCacheLoss itself",
    ),
    "drop": (lambda: TrainOneStepCell(cell(), sgd(Tower()), bad_micro_batch="drop"), ValueError, "'bad_micro_batch'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_when_it_is_built(name, monkeypatch):
    build, error, key = REFUSED[name]
    # Of the optimizer's parameters, that of another network.
    monkeypatch.setattr("ms_gradaccum.loops.train_step.check_optimizer", lambda *_: None)
    with refuses(error, key):
        build()


def test_a_step_inside_a_larger_graph_is_refused(monkeypatch):
    monkeypatch.delenv("MS_JIT")
    ms.set_context(mode=ms.GRAPH_MODE)
    around = Around(sgd_step(cell()))
    with refuses(ValueError, "a GradCacheLoss cannot be trained inside a larger graph"):
        around(*map(Tensor, batch("correlation", 0, 8)))


def test_the_compilers_own_parallelism_is_refused(monkeypatch):
    monkeypatch.setattr("ms_gradaccum.static_graph.settings._check_context", lambda *_: None)
    kind = SemiAuto(AutoParallel(Tower()))
    with refuses(ValueError, "'network'", "takes two passes"):
        check_step(kind, GradAccumulation(network := cell(), 2), sgd(network))


def test_inputs_that_are_labels_alone_are_refused():
    with refuses(ValueError, "there must be more"):
        sgd_step(GradCacheLoss(Tower(), Correlation(), labels=2))(*map(Tensor, batch("correlation", 0, 8)))


def test_verify_names_it_where_rows_depend_on_each_other_and_finds_it_equal():
    inputs = [Tensor(array) for array in batch("supervised contrastive", 0, 18)]
    report = verify(OrdinaryLoss(*parts_of("supervised contrastive")), inputs, 3)
    assert not report.equal and "rows interact" in report.causes[0]
    reference = OrdinaryLoss(*parts_of("supervised contrastive"))
    network = GradCacheLoss(reference.network, reference.loss, labels=1)
    report = verify(network, inputs, 3, reference=reference)
    assert report.equal, report.causes


def test_a_loss_that_draws_is_refused_on_several_processes():
    settings = SimpleNamespace(owner="TrainOneStepCell", drop_non_finite=False)
    alone = SimpleNamespace(is_distributed=False, grads_are_reduced=False)
    is_distributed = SimpleNamespace(is_distributed=True, grads_are_reduced=False)
    like = SimpleNamespace(parameters=(), micro_loss=SimpleNamespace(half=False))
    drawing = Of(nn.Dropout(p=0.5), lambda rows, labels: rows.mean())
    network = GradAccumulation(GradCacheLoss(Tower(), drawing, labels=1).set_train(), 2)
    with refuses(ValueError, "'loss_fn'"):
        CachePass(network.network, 0, settings, like, is_distributed)
    CachePass(network.network, 0, settings, like, alone)
    # In evaluation mode it draws nothing.
    network.set_train(False)
    CachePass(network.network, 0, settings, like, is_distributed)


def test_gradients_that_come_reduced_are_refused():
    settings = SimpleNamespace(owner="TrainOneStepCell", drop_non_finite=False)
    reducer = SimpleNamespace(is_distributed=True, grads_are_reduced=True)
    with refuses(ValueError, "'network'", "place of hsdp()"):
        CachePass(cell(), 0, settings, None, reducer)


class Uses(nn.Cell):
    def __init__(self, operator):
        super().__init__()
        self.operator = operator


OPERATORS = {
    True: [ops.StandardNormal(), ops.UniformReal(), ops.Dropout2D(), ops.Multinomial(), ops.RandomShuffle()],
    False: [ops.L2Normalize(), ops.LayerNorm(), ops.BatchNorm(), ops.Softmax(), ops.NMSWithMask()],
}


@pytest.mark.parametrize("draws,operator", [(draws, each) for draws in OPERATORS for each in OPERATORS[draws]])
def test_operators_that_draw_are_told_from_those_that_normalise(draws, operator):
    assert random_cells(Uses(operator).set_train()) == ("Uses" if draws else "")


def test_a_loss_of_two_numbers_is_refused():
    two_numbers = Of(nn.Identity(), lambda rows, labels: (rows.mean(), ops.square(rows).mean()))
    step = sgd_step(GradCacheLoss(Tower(), two_numbers, labels=1))
    with refuses(ValueError, "returns one number"):
        step(*map(Tensor, batch("correlation", 0, 8)))
