"""Conversion of networks to 16-bit computation."""

import atexit
import functools
import os
import shutil
import sys
import tempfile

import mindspore as ms
from mindspore import amp, nn
from mindspore.ops import functional as F
from mindspore.train.amp import _OutputTo32

from ms_gradaccum._checks import argument_error, require
from ms_gradaccum.batch.grad_cache_loss import GradCacheLoss
from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss
from ms_gradaccum.gradients.mixed_precision import Precision, levels_of


@functools.cache
def _folder_apart() -> str:
    # The folder is kept until the process ends because the compiler reads the sources.
    folder = tempfile.mkdtemp(prefix="ms_gradaccum_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class InputsInFloat32(nn.Cell):
    """Casts the inputs of a loss to float32. `to_float` alone does not do so op by op."""

    def __init__(self, loss_fn: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.loss_fn = loss_fn

    def construct(self, *inputs: object) -> object:
        return self.loss_fn(*F.mixed_precision_cast(ms.float32, inputs))


def in_precision(owner: str, loss_cell: nn.Cell, precision: Precision) -> nn.Cell:
    """Return the loss cell with a converted network and the loss in float32. It has the same parameters."""
    if precision.level == "O0":
        return loss_cell
    if type(loss_cell) is nn.WithLossCell:
        backbone = _converted(owner, loss_cell.backbone_network, precision)
        return nn.WithLossCell(_OutputTo32(backbone), loss_cell._loss_fn)
    if type(loss_cell) is TokenMeanLoss:
        return TokenMeanLoss(_converted(owner, loss_cell.backbone, precision), loss_cell.ignore_index)
    if isinstance(loss_cell, GradCacheLoss):
        return GradCacheLoss(_converted(owner, loss_cell.backbone, precision), loss_cell.loss_fn, loss_cell.labels)
    converted = _converted(owner, loss_cell, precision)
    if precision.level in ("O2", "O3"):
        # The loss cell's own operators and the labels; the cells inside stay in half precision.
        converted.add_flags(fp16=False, bf16=False, fp32=True)
    for _, cell in list(converted.cells_and_names()):
        for name, inner in cell.name_cells().items():
            if isinstance(inner, nn.LossBase) and type(cell) is not InputsInFloat32:
                setattr(cell, name, InputsInFloat32(inner).to_float(ms.float32))
    return converted


def _converted(owner: str, network: nn.Cell, precision: Precision) -> nn.Cell:
    level = precision.level
    found = levels_of(cell for _, cell in network.cells_and_names())
    rule = f"the level that the network has been converted to, {' and '.join(sorted(found))}"
    remedy = "A network cannot be converted twice: give that level, or another network."
    require(found <= {level}, owner, "mixed_precision", rule, level, remedy)
    if found:
        return network
    # Level O1 writes rewritten sources into the working directory, where it would take packages in a .venv for the
    # user's code, too, and leaves folders in the module search path, one of which hides Python's `math` from processes.
    here, path = os.getcwd(), list(sys.path)
    os.chdir(_folder_apart())
    try:
        converted = amp.auto_mixed_precision(network, level, precision.dtype)
    except RuntimeError as error:
        # It does not support all of Python's syntax.
        rule, got = "a level that MindSpore can convert the network to", f"{level}: {str(error).splitlines()[0]}"
        remedy = "Name the inputs of each construct, in place of *inputs, or take level 'O2'."
        raise ValueError(argument_error(owner, "mixed_precision", rule, got, remedy)) from error
    finally:
        os.chdir(here)
        sys.path[:] = path
    if level in ("O2", "O3"):
        # The outer cell, which casts the output, is removed because it hides the names of the inputs.
        (converted,) = converted.cells()
        converted._amp_level = level
    return converted
