"""From the setting ``parallel`` and the world to what reduces the sums of a window."""

import warnings
from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import sentence
from ms_gradaccum.parallel.data_parallel import DataParallel, SumOverRanks
from ms_gradaccum.parallel.single import SingleProcess
from ms_gradaccum.parallel.world import check_agreement, current_world, unify

_REMEDY = "'auto' looks at the number of processes."


def check_parallel(owner: str, parallel: Any, network: nn.Cell) -> Any:
    """Return the kind of parallelism, or None for a single process. Raise for one that cannot work here."""
    if parallel != "auto" and not isinstance(parallel, DataParallel):
        raise TypeError(sentence(owner, "parallel", "'auto' or DataParallel()", repr(parallel), _REMEDY))
    world = current_world(owner)
    if world.size == 1:
        return None
    if isinstance(network, AutoParallel):
        got = f"AutoParallel on {world.size} {ms.get_context('device_target')} processes"
        raise ValueError(
            sentence(owner, "network", "without AutoParallel when there are several processes", got,
                     "Leave AutoParallel out: the processes then train data-parallel.")
        )  # fmt: skip
    return DataParallel()


def build_parallel(
    owner: str, kind: Any, weights: ParameterTuple, cells: tuple[nn.Cell, ...], settings: dict[str, Any]
) -> SingleProcess:
    """Return what reduces the sums of ``weights``; the parameters of ``cells`` start equal on all ranks. Collective."""
    if kind is None:
        return SingleProcess(weights)
    shapes = [(weight.name, tuple(weight.shape), str(weight.dtype)) for weight in weights]
    check_agreement(owner, {**settings, "the optimizer's parameters": shapes})
    for cell in cells:
        cell.init_parameters_data()
    parameters = {parameter.name: parameter for cell in cells for parameter in cell.get_parameters()}
    if unify(parameters.values()):
        warnings.warn(
            f"For '{owner}', the ranks started with different parameters: those of rank 0 are used. "
            f"Call mindspore.set_seed() with the same seed on all ranks, or load the same checkpoint.",
            stacklevel=4,
        )
    return SumOverRanks(weights)
