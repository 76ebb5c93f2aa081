"""The causes that verify names: layers and state of the network, and what the measurement says about its loss."""

from collections.abc import Iterator, Sequence

from mindspore import nn

from ms_gradaccum._checks import listed
from ms_gradaccum.advice.loss_measurement import HIDE
from ms_gradaccum.backend.training_cells import BATCH_NORMS, DROPOUTS, acts_otherwise_in_training
from ms_gradaccum.tools.verification.experiment import Experiment
from ms_gradaccum.tools.whole_batch import Run, largest_difference

_NUM_SHOWN = 5


def causes_of(
    experiment: Experiment,
    window: Run,
    whole: Run,
    reference: Run | None,
    moved: Sequence[str],
    rtol: float,
) -> Iterator[str]:
    """Yield a sentence per cause. ``moved`` has the names of the parameters that differ in their state."""
    runs = {"the window": window, "the whole batch": whole}
    if reference is not None:
        runs["the reference"] = reference
    places = [name for name, run in runs.items() if not run.is_finite]
    if places:
        yield (
            f"An Inf or NaN in {' and '.join(places)}: nothing can be compared. Look for a mean "
            f"over no tokens or an overflow of 16 bits."
        )
        return
    micro_batches = len(experiment.rows)
    dropouts = _layers(experiment, DROPOUTS)
    if dropouts:
        yield (
            f"Dropout ({listed([*dropouts], _NUM_SHOWN)}): each micro batch draws its own masks, "
            f"which changes nothing on average. Set p=0 to compare the rest."
        )
    norms = _layers(experiment, BATCH_NORMS)
    if norms and micro_batches > 1:
        yield (
            f"BatchNorm ({listed([*norms], _NUM_SHOWN)}): each micro batch is normalised by its "
            f"own statistics, and the moving averages move {micro_batches} times instead of once. "
            f"Use GroupNorm or LayerNorm, freeze it (use_batch_statistics=False), or take larger "
            f"micro batches."
        )
    owned: set[str] = set()
    for norm in norms.values():
        owned |= {parameter.name for parameter in norm.get_parameters()}
    others = [name for name in moved if name not in owned]
    if others:
        yield (
            f"State of the network ({listed(others, _NUM_SHOWN)}): each forward pass changes it, "
            f"{micro_batches} times in a window and once with the whole batch. Change it once per "
            f"update, outside of the network."
        )
    # A loss that needs all rows is that of the whole batch, whatever the micro batches are.
    if not experiment.network.needs_all_rows:
        text = (
            experiment.measure()
            .removeprefix("For 'GradAccumulation', ")
            .removesuffix(HIDE)
            .rstrip()
        )
        if text:
            yield text[0].upper() + text[1:]
    if reference is not None and largest_difference(whole, reference) > rtol:
        losses = f"losses {whole.losses[0]:.4g} and {reference.losses[0]:.4g}"
        yield (
            f"network differs from reference on the whole batch ({losses}). Remove a division by "
            f"the number of micro batches, or give the loss cell that network stands for."
        )


def _layers(experiment: Experiment, kinds: tuple[type[nn.Cell], ...]) -> dict[str, nn.Cell]:
    """Return the layers of these kinds that act otherwise in training than in evaluation, by name."""
    found = {}
    for name, cell in experiment.network.network.cells_and_names():
        if isinstance(cell, kinds) and acts_otherwise_in_training(cell):
            found[name or "the network"] = cell
    return found
