"""``create_trainer`` of mindcv with this package's accumulation."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from mindspore import amp, nn
from mindspore.train import Metric

from ms_gradaccum._checks import check_bool, check_choice, check_float
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.integrations.scale_sense import scale_taken_out
from ms_gradaccum.loops.epoch import LastWindow
from ms_gradaccum.loops.model import Model
from ms_gradaccum.parallel.kinds import ParallelChoice
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.settings import BadMicroBatch

_OWNER = "create_trainer"


def create_trainer(
    network: nn.Cell,
    loss: nn.Cell,
    optimizer: nn.Cell,
    metrics: Mapping[str, Metric] | AbstractSet[str] | None,
    amp_level: str,
    amp_cast_list: str | None,
    loss_scale_type: str,
    loss_scale: float = 1.0,
    drop_overflow_update: bool = False,
    ema: bool = False,
    ema_decay: float = 0.9999,
    clip_grad: bool = False,
    clip_value: float = 15.0,
    gradient_accumulation_steps: int = 1,
    *,
    micro_size: int = 1,
    last_window: LastWindow = "apply",
    parallel: ParallelChoice = "auto",
    bad_micro_batch: BadMicroBatch = "skip_window",
    compile: bool | None = None,
) -> Model:
    r"""Return a Model like mindcv's function of the same name, with this package's accumulation.

    The positional arguments are those of mindcv 0.3.0, and so is the conversion to half precision. `network`, `loss`,
    `metrics`, `amp_level`, `amp_cast_list`, `clip_grad` and `clip_value` are as in mindcv.

    Args:
        optimizer (Cell): The optimizer, with a `loss_scale` of 1: the gradient is already divided by the scale.
        loss_scale_type (str): ``"fixed"``, ``"dynamic"``, or ``"auto"``, which means fixed.
        loss_scale (float): The scale, or the initial value of a dynamic scale. Default: ``1.0``.
        drop_overflow_update (bool): Whether to skip the update of a window whose gradient has an Inf or a NaN; always
            with a dynamic scale. Default: ``False``.
        ema (bool): Only ``False``: :class:`ms_gradaccum.EMA` is a callback, which takes `ema_decay`.
        gradient_accumulation_steps (int): Number of batches of one update. Default: ``1``.

    Keyword Args:
        micro_size (int): The number of micro batches of each batch (a count, not rows). Default: ``1``.
        last_window, parallel, bad_micro_batch, compile (optional): As of :class:`ms_gradaccum.Model`.

    Returns:
        :class:`ms_gradaccum.Model`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range or `ema` is set.

    Supported Platforms:
        ``GPU`` ``CPU``
    """
    remedy = (
        f"Give the callback ms_gradaccum.EMA({ema_decay}, trainable_only=False) to train() or "
        f"fit()."
    )
    if check_bool(_OWNER, "ema", ema, remedy):
        raise ValueError(
            f"For '{_OWNER}', the argument 'ema' must be False, but got True. {remedy}"
        )
    from mindcv.utils.amp import auto_mixed_precision
    from mindcv.utils.trainer_factory import add_loss_network

    clip = None
    if check_bool(_OWNER, "clip_grad", clip_grad, "The limit is clip_value."):
        clip = ClipByGlobalNorm(clip_value)
    mixed_precision = _loss_scale(loss_scale_type, loss_scale, drop_overflow_update)
    eval_network = nn.WithEvalCell(network, loss, amp_level in ("O2", "O3", "auto"))
    # mindcv converts the network in place.
    auto_mixed_precision(network, amp_level, amp_cast_list)
    loss_cell = GradAccumulation(add_loss_network(network, loss, amp_level), micro_size)
    with scale_taken_out():
        return Model(
            loss_cell,
            None,
            optimizer,
            metrics,
            eval_network,
            [0, 1, 2],
            accumulation_steps=gradient_accumulation_steps,
            clip=clip,
            mixed_precision=mixed_precision,
            last_window=last_window,
            parallel=parallel,
            bad_micro_batch=bad_micro_batch,
            compile=compile,
        )


def _loss_scale(kind: object, value: object, drops: object) -> Any:
    name = kind
    if isinstance(kind, str):
        name = kind.lower()
    remedy = "A fixed scale stays; a dynamic one adapts."
    name = check_choice(_OWNER, "loss_scale_type", name, ("fixed", "dynamic", "auto"), remedy)
    value = check_float(_OWNER, "loss_scale", value, "1.0 scales nothing.")
    drops = check_bool(
        _OWNER, "drop_overflow_update", drops, "It skips windows with an Inf or a NaN."
    )
    if name == "dynamic":
        return amp.DynamicLossScaler(value, scale_factor=2, scale_window=2000)
    return amp.FixedLossScaleManager(value, drops)
