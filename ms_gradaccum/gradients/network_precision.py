"""The conversion of networks to 16 bits, with the loss in float32."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, amp, nn
from mindspore.ops import functional as F

from ms_gradaccum.backend.mindspore_private import OutputTo32
from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss
from ms_gradaccum.batch.whole_batch_loss import WholeBatchLoss
from ms_gradaccum.gradients.mixed_precision import Precision


def levels_of(cells: Iterable[nn.Cell]) -> set[str]:
    """Return the levels of mixed precision that ``amp.auto_mixed_precision`` has converted cells to."""
    return {getattr(cell, "_amp_level", None) or "O0" for cell in cells} - {"O0"}


def computes_in_16_bits(parameters: Iterable[Parameter], cells: Iterable[nn.Cell]) -> bool:
    """Return whether there are 16-bit parameters, or cells that are set to compute in 16 bits."""
    if any(parameter.dtype in (ms.float16, ms.bfloat16) for parameter in parameters):
        return True
    for cell in cells:
        flags = cell.get_flags()
        if levels_of([cell]) or flags.get("fp16") or flags.get("bf16"):
            return True
    return False


@functools.cache
def _folder_apart() -> str:
    # Keep the folder until the process ends, because the compiler reads the sources.
    folder = tempfile.mkdtemp(prefix="ms_gradaccum_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class InputsInFloat32(nn.Cell):
    """Cast the inputs of a loss to float32. Op by op, `to_float` does not do so."""

    def __init__(self, loss_fn: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.loss_fn = loss_fn

    def construct(self, *inputs: object) -> object:
        return self.loss_fn(*F.mixed_precision_cast(ms.float32, inputs))


def in_precision(owner: str, loss_cell: nn.Cell, precision: Precision) -> nn.Cell:
    """Return the loss cell with a converted network and the loss in float32. It has the same parameters."""
    if type(loss_cell) is nn.WithLossCell:
        backbone = _converted(owner, loss_cell.backbone_network, precision)
        return nn.WithLossCell(OutputTo32(backbone), loss_cell._loss_fn)
    if type(loss_cell) is TokenMeanLoss:
        return loss_cell.around(_converted(owner, loss_cell.backbone, precision), precision.dtype)
    if isinstance(loss_cell, WholeBatchLoss):
        return loss_cell.around(_converted(owner, loss_cell.backbone, precision))
    converted = _with_token_losses(owner, loss_cell, precision)
    if precision.level in ("O2", "O3"):
        # The loss cell's own operators and the labels; the cells inside stay in half precision.
        converted.add_flags(fp16=False, bf16=False, fp32=True)
    for _, cell in list(converted.cells_and_names()):
        for name, inner in cell.name_cells().items():
            if isinstance(inner, nn.LossBase) and type(cell) is not InputsInFloat32:
                setattr(cell, name, InputsInFloat32(inner).to_float(ms.float32))
    return converted


class _StandIn(nn.Cell):
    """Stands for a TokenMeanLoss while MindSpore rewrites the loss cell around it, which cannot rewrite `*inputs`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number_of_token_loss = number  # The rewritten cell has it, too.

    def construct(
        self, a: object, b: object = None, c: object = None, d: object = None, e: object = None
    ) -> object:
        return a


def _with_token_losses(owner: str, loss_cell: nn.Cell, precision: Precision) -> nn.Cell:
    """Convert a loss cell. Each TokenMeanLoss in it is replaced by one that computes its products in half precision."""
    losses = [cell for _, cell in loss_cell.cells_and_names() if type(cell) is TokenMeanLoss]
    for _, cell in list(loss_cell.cells_and_names()):
        for name, inner in cell.name_cells().items():
            if type(inner) is TokenMeanLoss:
                setattr(cell, name, _StandIn(losses.index(inner)))
    try:
        converted = _converted(owner, loss_cell, precision)
    except BaseException:
        _fill_in(loss_cell, losses)
        raise
    halves = []
    for each in losses:
        backbone: Any = each.backbone
        if list(backbone.get_parameters()):
            # Else it may be nn.Identity, which MindSpore cannot rewrite.
            backbone = _converted(owner, backbone, precision)
        halves.append(each.around(backbone, precision.dtype))
    _fill_in(converted, halves)
    _fill_in(loss_cell, losses)  # Nothing is left where both have the same cells inside.
    return converted


def _fill_in(network: nn.Cell, losses: Sequence[nn.Cell]) -> None:
    for _, cell in list(network.cells_and_names()):
        for name, inner in cell.name_cells().items():
            number = getattr(inner, "number_of_token_loss", None)
            if number is not None:
                setattr(cell, name, losses[number])


def _converted(owner: str, network: nn.Cell, precision: Precision) -> nn.Cell:
    level = precision.level
    found = levels_of(cell for _, cell in network.cells_and_names())
    if found - {level}:
        raise ValueError(
            f"For '{owner}', the argument 'mixed_precision' must be the present level of the "
            f"network, {' and '.join(sorted(found))}, but got {level}. A network cannot be "
            f"converted twice: give that level, or another network."
        )
    if found:
        return network
    # Level O1 writes rewritten sources into the working directory. There it would also treat packages in a .venv as
    # user code, and leave folders in the module search path, one of which hides Python's `math` from processes.
    here = os.getcwd()
    path = list(sys.path)
    os.chdir(_folder_apart())
    try:
        converted = amp.auto_mixed_precision(network, level, precision.dtype)
    except (RuntimeError, NameError) as error:
        # It does not support all of Python's syntax, and looks for classes in modules alone.
        remedy = "name the inputs of each construct() in place of *inputs"
        if isinstance(error, NameError):
            remedy = "define the classes of the network outside of functions"
        raise ValueError(
            f"For '{owner}', the argument 'mixed_precision' must fit MindSpore's conversion, but "
            f"got {level}: {str(error).splitlines()[0]}. Give level 'O2', or {remedy}."
        ) from error
    finally:
        os.chdir(here)
        sys.path[:] = path
    if level in ("O2", "O3"):
        # The outer cell, which casts the output, is removed because it hides the names of the inputs.
        (converted,) = converted.cells()
        converted._amp_level = level
    return converted
