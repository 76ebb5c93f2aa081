"""The micro steps of a network's batches, each a compiled graph, one after the other."""

from collections.abc import Hashable, Sequence
from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, Tensor

from ms_gradaccum._checks import warn
from ms_gradaccum.ambiguous_inputs import explain_split
from ms_gradaccum.compiled import NOTHING, Compiled
from ms_gradaccum.convolutions import has_convolutions, pixels, warn_if_slow
from ms_gradaccum.events import Events
from ms_gradaccum.loss_weight import WeightedLoss
from ms_gradaccum.micro_batch import MicroBatch
from ms_gradaccum.micro_step import EmptyStep, MicroStep, make_micro_step
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.precision import Precision
from ms_gradaccum.structure import why_no_graph
from ms_gradaccum.thread_pool import is_faster

_MANY_STRUCTURES = 8


class MicroSteps:
    """The micro steps of the batches of a network, each run as a compiled graph.

    Args:
        owner: Whose name errors begin with.
        network: The GradAccumulation.
        parallels: One per optimizer.
        weights: One per optimizer: the parameters that it updates.
        precision: What computes in 16 bits, and the loss scale.
        drops: Whether a micro batch that is not finite is left out.
    """

    def __init__(
        self,
        owner: str,
        network: Any,
        parallels: Sequence[SingleProcess],
        weights: Sequence[ParameterTuple],
        precision: Precision,
        drops: bool,
    ) -> None:
        warn_if_slow(owner, network)
        self.owner = owner
        self.precision = precision
        self.drops = drops
        self.network = network
        self.parallels = parallels
        self.weights = weights
        # For a larger graph, which takes inputs as they are.
        self.cell = self._build(network.weighted_loss)
        # One per structure of the inputs, nearly always one, and per whether the sums are reduced with it.
        self.by_structure: dict[tuple[Hashable, bool], Compiled] = {}
        # Ranks share their cores, and what they send must come in one order.
        self.may_use_thread_pool = not parallels[0].several
        self.empty_step = EmptyStep(parallels)
        self.run_empty_step = Compiled(lambda: self.empty_step, owner, "the empty step")
        # Whether the last batch may have added something before it failed.
        self.has_added = False
        # Who is told of each micro batch.
        self.events = Events(owner)

    def compiled_cells(self) -> list[Any]:
        """Return what has a mode and settings of its own."""
        return [self.cell, self.empty_step, *self.by_structure.values()]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], reduces: bool = False) -> list[Any]:
        """Add one batch and return what each of its micro steps returned; the last one may reduce the sums too."""
        self.has_added = False
        structure, micro_batches = self.network.split(*args, **kwargs)
        counts = {rows: Tensor(rows, ms.float32) for rows in {part.rows for part in micro_batches}}
        inputs = [(counts[rows], *tensors) for rows, tensors in micro_batches]
        micro_step = self._for(structure, micro_batches)
        # Before any of them: the messages of all ranks must come in one order.
        rounds = self.parallels[0].rounds(len(micro_batches))
        outputs: list[Any] = []
        done = self.events.micro_batches
        # A callback may raise before its first run.
        micro_step.has_run = False
        try:
            for index, (rows, _) in enumerate(micro_batches):
                self.events.micro_batch_begin(index, rows)
                if reduces and index == len(micro_batches) - 1:
                    micro_step = self._for(structure, micro_batches, reduces)
                outputs.append(micro_step(*inputs[index]))
                self.events.micro_batch_end(index, rows)
        except BaseException as error:
            self.has_added = bool(outputs) or micro_step.has_run
            self.events.micro_batches = done
            if isinstance(error, Exception):
                explain_split(self.network, error, args, kwargs)
            raise
        self._add_nothing(rounds - len(outputs))
        return outputs

    def join(self) -> None:
        """Take part in a batch of the other processes without one."""
        self._add_nothing(self.parallels[0].rounds(0))

    def _add_nothing(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self.run_empty_step(NOTHING)

    def _is_for_thread_pool(self, micro_batches: list[MicroBatch]) -> bool:
        if not micro_batches or not self.may_use_thread_pool:
            return False
        rows, tensors = micro_batches[0]
        positions = pixels(tensors) if has_convolutions(self.network) else rows
        return is_faster(self.cell.weights, positions, self.cell.jit_config_dict)

    def _for(self, structure: Hashable, micro_batches: list[MicroBatch], reduces: bool = False) -> Compiled:
        """Return the micro step for a structure; who runs it is decided by its first batch."""
        key = (structure, reduces)
        if key not in self.by_structure:
            pooled = self._is_for_thread_pool(micro_batches)
            self.by_structure[key] = Compiled(
                lambda: self._build(self.network.loss_of(structure), pooled, reduces),
                self.owner,
                "the network",
                why_no_graph(structure),
                takes_gradient=True,
            )
            if len({known for known, _ in self.by_structure}) == _MANY_STRUCTURES and not reduces:
                warn(
                    f"For '{self.owner}', the inputs must keep their structure and Python values, but got "
                    f"{_MANY_STRUCTURES} different ones, each compiled on its own. Make values that change tensors.",
                )
        return self.by_structure[key]

    def _build(self, weighted_loss: WeightedLoss, pooled: bool = False, reduces: bool = False) -> MicroStep:
        cell = make_micro_step(weighted_loss, self.parallels, self.weights, self.precision, self.drops)
        cell.reduces = reduces
        cell.in_thread_pool = pooled
        if hasattr(self, "cell"):
            cell.set_train(self.cell.training)
            cell._get_attr_from_cell(self.cell)  # What `set_jit_config` has said.
        else:
            cell.set_train()
        return cell
