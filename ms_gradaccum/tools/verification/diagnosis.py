"""The causes of a difference between a window and the whole batch, each confirmed by an experiment."""

import math
from dataclasses import replace

from mindspore import nn

from ms_gradaccum._checks import listed
from ms_gradaccum.batch.ambiguous_inputs import ambiguous_inputs
from ms_gradaccum.tools.verification.experiment import Experiment, Run, combine, is_finite, misfit, misfits, norm
from ms_gradaccum.training.network_modes import takes_batch_statistics

_SHOWN = 5
_GRADIENTS = (
    "Gradients that do not add up, and losses that do: a bprop or a hook that looks at more than one row, as clipping "
    "does, or rounding, if the difference is small. Let it treat each row alone, or give rtol."
)


class Diagnosis:
    """The search for causes. Causes that hide others come first, those that need all else to be equal come last."""

    def __init__(self, experiment: Experiment, window: Run, whole: Run, rtol: float) -> None:
        self.experiment, self.window, self.whole, self.rtol = experiment, window, whole, rtol
        self.count, self.causes = len(experiment.rows), list[str]()

    def search(self, moved: set[str]) -> tuple[str, ...]:
        """Return the causes. ``moved`` are the names of the parameters that differ in their state."""
        if self._all_finite() and not self._is_random():
            has_state = self._look_at_state(moved)
            if self._all_finite():
                self._look_at_loss(has_state)
                self._look_at_reference()
        return tuple(self.causes) or ("No cause was found. If the difference is small, it may be rounding: give rtol.",)

    def _same_gradient(self) -> bool:
        return max(misfits(self.window, self.whole)) <= self.rtol

    def _without(self, word: str) -> Experiment:
        """Return the same experiment with further cells in evaluation mode: those with ``word`` in their class name."""
        return replace(self.experiment, frozen=(*self.experiment.frozen, word))

    def _freeze(self, word: str) -> None:
        self.experiment = self._without(word)
        self.window, self.whole = self.experiment.window(), self.experiment.whole()

    def _all_finite(self) -> bool:
        """Report the places of an Inf or a NaN. Return True if there is none."""
        runs = {"the whole batch": self.whole, "the window": self.window}
        where = [name for name, run in runs.items() if not is_finite(run)]
        if where == ["the window"]:
            found = [str(i) for i in range(self.count) if not is_finite(self.experiment.micro_batch(i))]
            where[0] += f", in micro batch {', '.join(found)} counted from 0" if found else ""
        if where:
            self.causes.append(
                f"An Inf or NaN in {' and '.join(where)}: nothing can be compared. A mean over no tokens is one, as is "
                f"an overflow of 16 bits."
            )
        return not where

    def _is_random(self) -> bool:
        """Report the source of random numbers, and turn it off. Return True if that is not possible."""
        if _repeats_itself(self.experiment, self.rtol):
            return False
        layers = self._layers("Dropout")
        if layers and _repeats_itself(self._without("Dropout"), self.rtol):
            self.causes.append(
                f"Dropout ({listed([*layers], _SHOWN)}): two runs of one batch differ, and no more once it is off. "
                f"Each micro batch draws masks of its own, which changes nothing on average. Set p=0 to compare the "
                f"rest parameter by parameter."
            )
            self._freeze("Dropout")
            return False
        self.causes.append(
            "A random operator that is no Dropout layer, or state that is no parameter: two runs of the same batch "
            "differ, with Dropout turned off too. Nothing else could be tested. Turn it off to compare the rest."
        )
        return True

    def _look_at_state(self, moved: set[str]) -> bool:
        """Report the state that the forward pass changes, and freeze BatchNorm. Return True if there is other state."""
        layers = self._layers("BatchNorm")
        owned = {id(parameter) for layer in layers.values() for parameter in layer.get_parameters()}
        parameters = self.experiment.start.parameters()
        others = [each.name for each in parameters if each.name in moved and id(each) not in owned]
        if others:
            self.causes.append(
                f"State of the network ({listed(others, _SHOWN)}): each forward pass changes it, so a window does "
                f"{self.count} times and the whole batch once. Change it once per update, outside of the network, or "
                f"keep it constant."
            )
        if layers:
            differed = not self._same_gradient()
            self._freeze("BatchNorm")
            vanished = differed and is_finite(self.window) and is_finite(self.whole) and self._same_gradient()
            if vanished or len(moved) > len(others):
                self.causes.append(
                    f"BatchNorm ({listed([*layers], _SHOWN)}): each micro batch is normalised by its own statistics, "
                    f"and the moving averages move {self.count} times instead of once. Use GroupNorm or LayerNorm, "
                    f"freeze it (use_batch_statistics=False), or take larger micro batches."
                )
        return bool(others)

    def _layers(self, word: str) -> dict[str, nn.Cell]:
        """Return the outermost Dropouts that draw masks, or BatchNorms that use the statistics of their batch."""
        found: dict[str, nn.Cell] = {}
        for name, cell in self.experiment.network.network.cells_and_names():
            is_one = any(word in base.__name__ for base in type(cell).__mro__)
            if is_one and not any(name.startswith(f"{outer}.") for outer in found):
                found[name] = cell
        return {
            name or "the network": cell
            for name, cell in found.items()
            if getattr(cell, "p", 1) != 0 and getattr(cell, "keep_prob", 0) != 1 and takes_batch_statistics(cell)
        }

    def _look_at_loss(self, has_state: bool) -> None:
        if self._same_gradient() or self._is_input_split():
            return
        runs = [self.experiment.micro_batch(i) for i in range(self.count)]
        total = math.fsum(run.weight for run in runs)
        # Each micro batch runs from the start, so it does not see state from the micro batches before it.
        if misfit(combine([run.weight / total for run in runs], runs), self.whole, *runs) <= self.rtol:
            if not has_state:
                self.causes.append(
                    "State of the network: the micro batches, each from where the network was before them, give the "
                    "whole batch, and one after the other they do not. What a forward pass leaves to the next, such as "
                    "a queue, must change once per update, outside of the network."
                )
            return
        noise = misfit(self.experiment.whole(range(self.experiment.bounds[-1])[::-1]), self.whole)
        if noise > self.rtol and noise > misfit(self.window, self.whole) / 10:
            self.causes.append(
                f"Rounding, or a loss that depends on the order of its rows: the same batch with its rows reversed "
                f"differs by {noise:.1e} of the gradient. Compute in float32, or give rtol."
            )
        elif not self.experiment.network.is_cached:
            text = self.experiment.measure().removeprefix("For 'GradAccumulation', ") or _GRADIENTS
            self.causes.append(text[0].upper() + text[1:])

    def _is_input_split(self) -> bool:
        """Report an input that is not a batch: if each micro batch gets it whole, the window equals the whole batch."""
        experiment = self.experiment
        for place in ambiguous_inputs(experiment.inputs, experiment.network.batch_axis):
            try:
                network = experiment.network.without_split(place, experiment.inputs)
                window = replace(experiment, network=network).window()
            except Exception:
                continue  # The input has rows, and the network fails if it is not split.
            if is_finite(window) and max(misfits(window, self.whole)) <= self.rtol:
                name, shape = experiment.network.name_of_input(place), tuple(experiment.inputs[place].shape)
                self.causes.append(
                    f"An input that is no batch and is split like one: with {name} of shape {shape} whole in each "
                    f"micro batch, the gradients are equal. Give it None in batch_axis."
                )
                return True
        return False

    def _look_at_reference(self) -> None:
        if self.experiment.reference is None:
            return
        reference = self.experiment.whole(by_reference=True)
        if misfit(self.whole, reference) <= self.rtol:
            return
        ratio = norm(self.whole) / norm(reference) if norm(reference) else 0.0
        if misfit(self.whole, combine([ratio], [reference])) > self.rtol:
            self.causes.append(
                "Another loss: the whole batch in network differs from that in reference by no constant factor. Give "
                "the loss cell that network stands for."
            )
        else:
            self.causes.append(
                f"A factor: the whole batch in network has {ratio:.6g} times the gradient that it has in reference. "
                f"Take it out of the loss; if it is 1 / K of K micro batches, the window divides by its weight itself."
            )


def _repeats_itself(experiment: Experiment, rtol: float) -> bool:
    """Return whether the same batch gives the same loss and gradient with another random state."""
    first = experiment.whole()
    return all(misfit(first, experiment.whole(same_random=False)) <= rtol for _ in range(2))
