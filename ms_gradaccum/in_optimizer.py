"""Windows that are added up in the optimizer's own state: which ones can be, and how they begin."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import check_bool, sentence
from ms_gradaccum.grad_buffer import GradBuffer
from ms_gradaccum.grad_clip import NoClip
from ms_gradaccum.loss_scale import NoLossScale
from ms_gradaccum.parallel.data_parallel import DataParallel
from ms_gradaccum.precision import Precision

_SETTING = "accumulate_in_optimizer"
_REMEDY = "True saves the memory of the sums, where the optimizer's state can hold them."
_APART = "The gradient is never apart from the optimizer's state."
_KNOWN = "The weight of a window must be known before its first micro batch."


def check_in_optimizer(
    owner: str,
    setting: Any,
    optimizer: nn.Cell,
    network: Any,
    precision: Precision,
    *,
    parallel: Any,
    accumulation_steps: int,
    clip: Any,
    drops: bool,
) -> bool:
    """Return ``setting``, whether windows are added up in the state of ``optimizer``; raise if they cannot be.

    The other arguments are those of the training step after their own checks.
    """
    if not check_bool(owner, _SETTING, setting, _REMEDY):
        return False
    _check_optimizer(owner, optimizer)
    is_alone = parallel is None or (isinstance(parallel, DataParallel) and not parallel.sync_each_batch)
    is_unscaled = type(precision.loss_scale) is NoLossScale and precision.reduce_dtype == ms.float32
    for name, is_right, rule, got, remedy in (
        ("network", not network.weighted, "one of a mean loss over rows", "one that returns its own weight", _KNOWN),
        ("accumulation_steps", accumulation_steps == 1, "1", accumulation_steps, "Give larger batches instead."),
        ("clip", isinstance(clip, NoClip), "None", repr(clip), _APART),
        ("bad_micro_batch", not drops, "'skip_window'", "'drop'", _KNOWN),
        ("mixed_precision", is_unscaled, "without a loss scale or a reduce_dtype", precision.text, "Use 'bf16'."),
        ("parallel", is_alone, "'auto' or DataParallel()", repr(parallel), "Others shard the sums or the state."),
    ):
        if not is_right:
            raise ValueError(sentence(owner, name, f"{rule} with {_SETTING}", got, remedy))
    return True


def _check_optimizer(owner: str, optimizer: Any) -> None:
    rule, got, remedy = "nn.Momentum", "", _APART
    if type(optimizer) is not nn.Momentum:
        got = type(optimizer).__name__
        remedy = "Its state must be a sum of gradients. Instead of nn.SGD with a momentum take nn.Momentum."
    elif optimizer.use_nesterov:
        rule, got = "nn.Momentum without Nesterov", "use_nesterov=True"
    elif any(getattr(optimizer, "group_grad_centralization", [])):
        rule, got = "nn.Momentum without grad_centralization", "a group with it"
    elif optimizer.need_scale:
        rule, got = "nn.Momentum with loss_scale=1.0", f"loss_scale={optimizer.loss_scale}"
    elif any(weight.dtype != ms.float32 for weight in optimizer.parameters):
        rule, got = "one of float32 weights", "16-bit ones"
        remedy = "Their state is no place for sums; mixed_precision='bf16' leaves weights in float32."
    if got:
        raise ValueError(sentence(owner, "optimizer", f"{rule} with {_SETTING}", got, remedy))


class Opening(nn.Cell):
    """The beginning of a window in the optimizer's state, before its first micro batch."""

    def __init__(self, buffer: GradBuffer) -> None:
        super().__init__(auto_prefix=False)
        self.buffer = buffer

    def construct(self, rows: Tensor, opens: Tensor) -> Tensor:
        """Return ``rows``, those of this process's batch, once the state is ready for the first micro batch.

        If not ``opens``, take that back, which is exact up to rounding.
        """
        return ops.depend(rows + 0.0, self.buffer.open(rows, opens))

    def of(self, parts: tuple[Any, ...]) -> Tensor:
        """Do the same as part of a graph, for micro batches that begin with their rows, if the window is such a one."""
        rows = Tensor(0.0, ms.float32)
        if self.buffer.in_optimizer:
            for part in parts:
                rows = rows + part[0]
            rows = self.construct(rows, Tensor(True))
        return rows
