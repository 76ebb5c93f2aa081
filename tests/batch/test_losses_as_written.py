"""Losses as people write them: equal to MindSpore's own step on the whole batch, or named."""

import re
import warnings

import mindspore as ms
import numpy as np
import pytest
from losses_as_written import PARTS, RIGHT, WRONG, build
from mindspore import nn

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.training.loss_check import LossCheck
from ms_gradaccum.training.settings import StepSettings

NAME = "For 'GradAccumulation', the loss should be a mean over rows, but "
# Ways to write a loss that a compiler may read otherwise.
FORMS = {"cell_in_a_cell", "closure", "cell_of_mindspore", "<lambda>"}
SUMS = {
    *("tokens_summed", "mean_times_rows", "sum_of_squares", "sum_over_constant", "half_squared_norm", "vae_summed"),
    *FORMS,
}
EMPTY = {"masked_mean"}
MEET = {
    *("in_batch_negatives", "simclr", "pairs_of_batch", "supervised_contrastive", "barlow_twins", "variance_of_batch"),
    *("cox_survival", "listnet", "normalised_advantages", "load_balance", "neighbours_in_order"),
    *("maximum_mean_discrepancy", "pinn_sum", "pairwise_ranking", "centres_of_classes"),
    "weights_of_counted_classes",
}
WEIGHTS = {
    *("masked_mean_eps", "tokens_ignored", "tokens_by_mask", "label_smoothing_with_weights", "nll_of_class_weights"),
    *("boxes_by_positives", "weighted_rows", "weighted_rows_average"),
}


def trained(case, ours):
    """The weights after two updates, and what was said."""
    cell, inputs = build(case)
    optimizer = nn.SGD(cell.trainable_params(), 0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = nn.TrainOneStepCell(cell, optimizer)
        if ours:
            step = TrainOneStepCell(GradAccumulation(cell, PARTS), optimizer)
        step.set_train()
        for _ in range(2):
            step(*inputs)
    weights = np.concatenate([parameter.asnumpy().ravel() for parameter in cell.get_parameters()])
    return weights, [str(each.message) for each in caught if NAME in str(each.message)]


def distance(case):
    (whole, _), (parts, said) = trained(case, ours=False), trained(case, ours=True)
    return np.linalg.norm(whole - parts) / np.linalg.norm(whole), said


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_parts_train_otherwise_is_named_once(name, eager):
    far, said = distance(WRONG[name])
    assert far > 1e-6
    assert len(said) == 1
    kind = "it adds up its rows, so that 4 micro batches give 0.25 of the gradient" if name in SUMS else ""
    kind = "its rows meet" if name in MEET else kind
    kind = "it is a mean over something else" if name in WEIGHTS else kind
    kind = "some rows alone give nan" if name in EMPTY else kind
    assert kind in said[0] and said[0].count(" but ") == 1
    assert re.search(r"weighted=True\.$|or split no batch\.$", said[0])


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_parts_train_alike_is_not(name, eager):
    far, said = distance(RIGHT[name])
    assert far < 1e-6 and not said


# Each is a graph of its own: every third one, and each way to write one.
@pytest.mark.parametrize("name", dict.fromkeys([*sorted(FORMS | EMPTY), *[*WRONG, *RIGHT][::3]]))
def test_compiled_they_are_found_as_well(name, monkeypatch):
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=ms.GRAPH_MODE)
    cell, inputs = build({**WRONG, **RIGHT}[name])
    network = GradAccumulation(cell.set_train(), PARTS)
    settings = StepSettings.checked("TrainOneStepCell")
    check = LossCheck(network, cell.trainable_params(), settings, half=False, several=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check.after_batch(PARTS, inputs)
    assert bool([each for each in caught if NAME in str(each.message)]) == (name in WRONG)


def test_there_are_many():
    assert len(WRONG) >= 40 and len(RIGHT) >= 20
