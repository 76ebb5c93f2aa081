"""The causes that verify names: layers and state of the network, and what the measurement says about its loss."""

from collections.abc import Sequence

from mindspore import nn

from ms_gradaccum._checks import listed
from ms_gradaccum.advice.loss_measurement import HIDE
from ms_gradaccum.backend.training_cells import BATCH_NORMS, DROPOUTS, acts_otherwise_in_training
from ms_gradaccum.tools.verification.experiment import Experiment
from ms_gradaccum.tools.whole_batch import Run, largest_difference

_NUM_SHOWN = 5
_UNKNOWN = (
    "No cause was found. It may be a bprop or a hook that looks at several rows, random numbers, or rounding. Give "
    "rtol if the difference is small."
)


def causes_of(
    experiment: Experiment, window: Run, whole: Run, reference: Run | None, moved: Sequence[str], rtol: float
) -> tuple[str, ...]:
    """Return a sentence per cause. ``moved`` has the names of the parameters that differ in their state."""
    runs = {"the window": window, "the whole batch": whole}
    if reference is not None:
        runs["the reference"] = reference
    places = [name for name, run in runs.items() if not run.is_finite]
    if places:
        return (
            f"An Inf or NaN in {' and '.join(places)}: nothing can be compared. Look for a mean over no tokens or an "
            f"overflow of 16 bits.",
        )
    norms = _layers(experiment, BATCH_NORMS)
    sentences = [
        _of_dropout(experiment),
        _of_batch_norm(experiment, norms),
        _of_state(experiment, norms, moved),
        _of_loss(experiment),
        _of_reference(whole, reference, rtol),
    ]
    return tuple(filter(None, sentences)) or (_UNKNOWN,)


def _of_dropout(experiment: Experiment) -> str:
    layers = _layers(experiment, DROPOUTS)
    if not layers:
        return ""
    return (
        f"Dropout ({listed([*layers], _NUM_SHOWN)}): each micro batch draws its own masks, which changes nothing on "
        f"average. Set p=0 to compare the rest."
    )


def _of_batch_norm(experiment: Experiment, norms: dict[str, nn.Cell]) -> str:
    count = len(experiment.rows)
    if not norms or count == 1:
        return ""
    return (
        f"BatchNorm ({listed([*norms], _NUM_SHOWN)}): each micro batch is normalised by its own statistics, and the "
        f"moving averages move {count} times instead of once. Use GroupNorm or LayerNorm, freeze it "
        f"(use_batch_statistics=False), or take larger micro batches."
    )


def _of_state(experiment: Experiment, norms: dict[str, nn.Cell], moved: Sequence[str]) -> str:
    owned: set[str] = set()
    for norm in norms.values():
        owned |= {parameter.name for parameter in norm.get_parameters()}
    others = [name for name in moved if name not in owned]
    if not others:
        return ""
    return (
        f"State of the network ({listed(others, _NUM_SHOWN)}): each forward pass changes it, {len(experiment.rows)} "
        f"times in a window and once with the whole batch. Change it once per update, outside of the network."
    )


def _of_loss(experiment: Experiment) -> str:
    if experiment.network.needs_all_rows:  # Its loss is that of the whole batch, whatever the micro batches are.
        return ""
    text = experiment.measure().removeprefix("For 'GradAccumulation', ").removesuffix(HIDE).rstrip()
    return text[:1].upper() + text[1:]


def _of_reference(whole: Run, reference: Run | None, rtol: float) -> str:
    if reference is None or largest_difference(whole, reference) <= rtol:
        return ""
    losses = f"losses {whole.losses[0]:.4g} and {reference.losses[0]:.4g}"
    return (
        f"network differs from reference on the whole batch ({losses}). Remove a division by the number "
        f"of micro batches, or give the loss cell that network stands for."
    )


def _layers(experiment: Experiment, kinds: tuple[type[nn.Cell], ...]) -> dict[str, nn.Cell]:
    """Return the layers of these kinds that act otherwise in training than in evaluation, by name."""
    found = {}
    for name, cell in experiment.network.network.cells_and_names():
        if isinstance(cell, kinds) and acts_otherwise_in_training(cell):
            found[name or "the network"] = cell
    return found
