"""State of the context that decides whether MindSpore's compiler partitions a graph, as in semi-auto-parallel."""

from dataclasses import dataclass

from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum.backend.device import can_partition
from ms_gradaccum.backend.mindspore_private import auto_parallel_context, primexpr

_MODES = ("semi_auto_parallel", "auto_parallel")


@dataclass(frozen=True)
class SemiAuto:
    """Semi-auto-parallel, set by an AutoParallel or, without one, in MindSpore's context."""

    auto_parallel: AutoParallel | None


def in_semi_auto() -> bool:
    """Return whether a graph that is compiled now will be partitioned."""
    return auto_parallel_context().get_parallel_mode() in _MODES


def is_semi_auto(network: nn.Cell) -> bool:
    """Return whether ``network`` is for semi-auto-parallel, which does not support CPU."""
    return can_partition() and (isinstance(network, AutoParallel) or in_semi_auto())


@primexpr
def refuse_partition() -> None:
    """Raise if a step that the host drives is compiled in a graph that will be partitioned."""
    if in_semi_auto():
        raise ValueError(
            "For 'TrainOneStepCell', the argument 'network' must be a loss cell in AutoParallel, "
            "but got AutoParallel around it all. Put AutoParallel inside: "
            "TrainOneStepCell(AutoParallel(network), optimizer)."
        )
