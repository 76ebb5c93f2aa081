"""Mixed precision: the settings for 16-bit computation and its loss scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import mindspore as ms
from mindspore import amp, nn

from ms_gradaccum._checks import argument_error, check_choice, check_float, check_int
from ms_gradaccum.backend.device import this_device
from ms_gradaccum.backend.probes import clamps_overflow, multiply
from ms_gradaccum.gradients.clipping import pattern_indices
from ms_gradaccum.gradients.loss_scaler import (
    FixedLossScale,
    NoLossScale,
    dynamic_loss_scale,
    loss_scale_of,
)

_OWNER = "MixedPrecision"
Level = Literal["O0", "O1", "O2", "O3", "auto"]
# The first four are Colossal-AI's, the others MindSpore's.
Name = Literal["fp16", "fp16_apex", "fp16_naive", "bf16", "O1", "O2", "O3", "auto"]
# A dtype of MindSpore, or its name.
Dtype: TypeAlias = ms.Type | Literal["float16", "fp16", "bfloat16", "bf16", "float32", "fp32"]
LEVELS: tuple[Level, ...] = get_args(Level)
_CHOOSERS = (amp.LossScaler, amp.LossScaleManager)
_DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32}
_DTYPES |= {"fp16": ms.float16, "bf16": ms.bfloat16, "fp32": ms.float32}


@dataclass(frozen=True)
class MixedPrecision:
    r"""Half precision with a dynamic loss scale.

    The parameters, the sums of a window, the norm and the update stay in float32. The loss is multiplied by the scale
    before each backward pass, and the window's mean gradient is divided by it once. A window whose gradient has an Inf
    or a NaN makes no update: parameters, optimizer state, learning rate and update count stay, and the scale is
    multiplied by `backoff_factor`. After `growth_interval` clean windows it is multiplied by `growth_factor`. It never
    changes inside a window. Rule and names: PyTorch's ``GradScaler``, Colossal-AI's ``FP16TorchMixedPrecision``.

    Level O1 rewrites the network when the training step is built, with the training mode of its cells at that time: for
    a network with BatchNorm or Dropout, call ``network.set_train()`` before.

    The names ``fp16``, ``fp16_apex`` and ``fp16_naive`` are float16 at level O1, O2 and O3, ``bf16`` is bfloat16 at O1.

    Args:
        dtype (Union[mindspore.dtype, str]): ``float16`` or ``bfloat16``. With bfloat16, which has the range of float32,
            no loss scale is used. Default: ``mindspore.float16``.
        level (str): The operators that compute in `dtype`, as in ``mindspore.amp.auto_mixed_precision``. ``"O1"``:
            matrix products and convolutions. ``"O2"``: all but normalisation. ``"O3"``: all. ``"auto"``: operator by
            operator. ``"O0"``: the network is not converted, and may use ``to_float`` itself. Default: ``"O1"``.
        init_scale (float): The initial scale, at least 1. Default: ``65536``.
        growth_factor (float): Factor of a growth, at least 1. Default: ``2.0``.
        backoff_factor (float): Factor after an overflow, below 1. The scale does not fall below 1. Default: ``0.5``.
        growth_interval (int): Clean windows until the scale grows. Default: ``2000``.
        reduce_dtype (Union[mindspore.dtype, str, dict]): The dtype in which several processes reduce their gradients:
            ``float32``, ``float16`` or ``bfloat16``. 16 bits halve the messages and round each process's part of the
            scaled mean gradient. A dict gives a dtype per pattern of parameter names as in :class:`ClipByGroupNorm`;
            other parameters have float32. Keyword only. Default: ``mindspore.float32``.
        loss_scale (Union[LossScaler, LossScaleManager, None]): An object of ``mindspore.amp`` that chooses the scale
            instead of the four arguments above. It is called once per window. With
            ``FixedLossScaleManager(scale, drop_overflow_update=False)`` no window is skipped, and an optimizer with its
            own ``loss_scale`` gets the mean gradient multiplied by it. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import GradAccumulation, MixedPrecision, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=4)
        >>> optimizer = nn.SGD(network.trainable_params(), 0.02)
        >>> precision = MixedPrecision(ms.float16, "O2", init_scale=128)
        >>> train_step = TrainOneStepCell(loss_cell, optimizer, mixed_precision=precision)
        >>> x = ops.arange(1, 9).float().reshape(8, 1)
        >>> output = train_step(x, 2 * x)
        >>> print(output.loss_scale, output.updated, network.weight.value())
        128.0 True [[2.04]]
    """

    dtype: Dtype = ms.float16
    level: Level = "O1"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    loss_scale: amp.LossScaler | amp.LossScaleManager | None = field(default=None, repr=False)
    reduce_dtype: Dtype | Mapping[str, Dtype] = field(default=ms.float32, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        half = (ms.float16, ms.bfloat16)
        dtype = _dtype_of(
            "dtype", self.dtype, half, "float16 or bfloat16", "MindSpore trains in these two."
        )
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "reduce_dtype", _checked_reduce_dtype(self.reduce_dtype))
        check_choice(_OWNER, "level", self.level, LEVELS, "Higher levels compute more in 16 bits.")
        for name, remedy in (
            ("init_scale", "The default is 65536."),
            ("growth_factor", "The default is 2.0."),
        ):
            value = check_float(_OWNER, name, getattr(self, name), remedy, least=1)
            object.__setattr__(self, name, value)
        check_float(_OWNER, "backoff_factor", self.backoff_factor, "The default is 0.5.", below=1)
        check_int(
            _OWNER, "growth_interval", self.growth_interval, "It counts windows without overflow."
        )
        if self.loss_scale is not None and not isinstance(self.loss_scale, _CHOOSERS):
            raise TypeError(
                f"For 'MixedPrecision', the argument 'loss_scale' must be a LossScaler, a "
                f"LossScaleManager or None, but got {self.loss_scale!r}. For a number, give "
                f"init_scale."
            )


def _checked_reduce_dtype(given: object) -> ms.Type | dict[str, ms.Type]:
    asked = ((ms.float32, ms.float16, ms.bfloat16), "float32, float16 or bfloat16")
    remedy = "It is the dtype of messages between processes."
    if not isinstance(given, Mapping):
        return _dtype_of("reduce_dtype", given, *asked, remedy)
    if not given or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(
            f"For 'MixedPrecision', the argument 'reduce_dtype' must be a dtype, or a dict of a "
            f"dtype per pattern, but got {given}. For example {{'*weight': 'fp16'}}."
        )
    return {
        name: _dtype_of(f"reduce_dtype[{name!r}]", each, *asked, remedy)
        for name, each in given.items()
    }


def _dtype_of(
    name: str, value: object, choices: Sequence[object], rule: str, remedy: str
) -> ms.Type:
    dtype = _DTYPES.get(value, value) if isinstance(value, str) else value
    if dtype not in choices:
        raise ValueError(argument_error(_OWNER, name, rule, repr(value), remedy))
    return dtype


def reduce_dtypes(
    reduce_dtype: ms.Type | Mapping[str, ms.Type], names: Sequence[str]
) -> tuple[ms.Type, ...]:
    """Return the dtype in which the gradient of each parameter is reduced; the default is float32."""
    if not isinstance(reduce_dtype, Mapping):
        return (reduce_dtype,) * len(names)
    dtypes = (*reduce_dtype.values(), ms.float32)
    return tuple(
        dtypes[group] for group in pattern_indices(_OWNER, "reduce_dtype", reduce_dtype, names)
    )


# The type of the argument `mixed_precision`.
_UpdateCell = nn.DynamicLossScaleUpdateCell | nn.FixedLossScaleUpdateCell
PrecisionChoice = Name | MixedPrecision | amp.LossScaler | amp.LossScaleManager | _UpdateCell | None
# The settings of each name.
NAMES: dict[str, MixedPrecision] = {
    "fp16": MixedPrecision(ms.float16, "O1"),
    "fp16_apex": MixedPrecision(ms.float16, "O2"),
    "fp16_naive": MixedPrecision(ms.float16, "O3"),
    "bf16": MixedPrecision(ms.bfloat16, "O1"),
    **{level: MixedPrecision(ms.float16, level) for level in LEVELS[1:]},
}
# The names in other libraries.
_OTHER_NAMES = {
    **dict.fromkeys(
        ("float16", "half", "16", "16-mixed", "16-true", "amp", "true", "auto_mixed"), "'fp16'"
    ),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "'bf16'"),
    **dict.fromkeys(("no", "none", "false", "float32", "fp32", "32", "32-true", "o0"), "None"),
    **{level.lower(): repr(level) for level in ("O1", "O2", "O3")},
}


class Precision(NamedTuple):
    """The settings of mixed precision in effect."""

    level: str  # The level of the converted network.
    dtype: ms.Type  # The dtype of the converted network.
    loss_scale: NoLossScale
    text: str  # The settings as text, for the ranks to compare.
    reduce_dtype: ms.Type | Mapping[str, ms.Type]


def combined(
    owner: str, mixed_precision: object, amp_level: Any, loss_scale_manager: object
) -> MixedPrecision | None:
    """Combine ``mixed_precision`` with the two arguments of MindSpore's Model. Return None if none is given."""
    check_choice(
        owner, "amp_level", amp_level, LEVELS, "mixed_precision has more names and settings."
    )
    if loss_scale_manager is not None and mixed_precision is not None:
        raise ValueError(
            f"For '{owner}', the argument 'mixed_precision' must be None with a "
            f"loss_scale_manager, but got {mixed_precision!r}. MixedPrecision(..., "
            f"loss_scale=manager) takes both."
        )
    settings = _settings(
        owner, mixed_precision if loss_scale_manager is None else loss_scale_manager
    )
    if settings is None or amp_level == "O0":
        return settings or NAMES.get(amp_level)
    if settings.level not in ("O0", amp_level):
        raise ValueError(
            f"For '{owner}', the argument 'mixed_precision' must agree with "
            f"amp_level={amp_level!r}, but got {mixed_precision!r}. Give one of the two."
        )
    return replace(settings, level=amp_level)


def check_precision(owner: str, mixed_precision: object) -> Precision:
    """Return the settings in effect, or raise if the argument is invalid."""
    settings = _settings(owner, mixed_precision)
    if settings is None:
        return Precision("O0", ms.float32, NoLossScale(), "None", ms.float32)
    scale: NoLossScale = NoLossScale()
    if settings.dtype == ms.bfloat16:
        try:
            multiply(ms.bfloat16)
        except Exception as error:
            raise ValueError(
                f"For '{owner}', the argument 'mixed_precision' must be a format of this device, "
                f"but got bfloat16 on {this_device()}. Use float16, for example "
                f"mixed_precision='fp16'."
            ) from error
    if settings.loss_scale is not None:
        scale = loss_scale_of(settings.loss_scale)
    elif settings.dtype == ms.float16:
        scale = dynamic_loss_scale(
            settings.init_scale,
            settings.growth_factor,
            settings.backoff_factor,
            settings.growth_interval,
        )
    if scale.scales and scale.skips_overflow and clamps_overflow():
        raise ValueError(
            f"For '{owner}', the loss scale skips windows with an Inf, which Ascend's saturation "
            f"mode never produces. Set MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE (Atlas A2 and "
            f"later), or train in float32 or bfloat16."
        )
    # Read without running an operator: a step can be built for a device that this machine does not have.
    number = scale.scale.asnumpy().item() if isinstance(scale, FixedLossScale) else 1.0
    text = f"{settings!r}, {type(settings.loss_scale).__name__}, {number}"
    return Precision(settings.level, settings.dtype, scale, text, settings.reduce_dtype)


def check_scale_of_each(owner: str, mixed_precision: object, networks: int) -> None:
    """Raise if several networks would share one loss scale object of MindSpore, which each of them would adjust."""
    settings = _settings(owner, mixed_precision)
    kind = type(settings and settings.loss_scale)
    fixed = (type(None), amp.FixedLossScaleManager, amp.StaticLossScaler)  # They adjust nothing.
    if networks > 1 and kind not in fixed:
        raise ValueError(
            f"For '{owner}', the argument 'mixed_precision' must make a loss scale for each "
            f"network, but got one {kind.__name__} for {networks}. Give a name, or a "
            f"MixedPrecision without a loss_scale."
        )


def _settings(owner: str, mixed_precision: object) -> MixedPrecision | None:
    if mixed_precision is None or isinstance(mixed_precision, MixedPrecision):
        return mixed_precision
    cell: Any = mixed_precision
    # The cells of MindSpore's own steps. The types must match exactly: a subclass may have another rule.
    if type(cell) is nn.DynamicLossScaleUpdateCell:
        factor = cell.scale_factor.asnumpy().item()
        interval = cell.scale_window.asnumpy().item()
        return MixedPrecision(
            ms.float16, "O0", float(cell.get_loss_scale()), factor, 1 / factor, interval
        )
    if type(cell) is nn.FixedLossScaleUpdateCell:
        mixed_precision = amp.FixedLossScaleManager(cell.get_loss_scale())
    if isinstance(mixed_precision, _CHOOSERS):
        return MixedPrecision(level="O0", loss_scale=mixed_precision)
    meant = _OTHER_NAMES.get(str(mixed_precision).lower())
    if isinstance(mixed_precision, str):
        remedy = f"Did you mean {meant}?" if meant else "MixedPrecision(...) takes single settings."
        return NAMES[check_choice(owner, "mixed_precision", mixed_precision, tuple(NAMES), remedy)]
    remedy = f"Did you mean {meant}?" if meant else "For example mixed_precision='fp16'."
    raise TypeError(
        f"For '{owner}', the argument 'mixed_precision' must be a name, a MixedPrecision, a "
        f"LossScaler, a LossScaleManager or None, but got {mixed_precision!r}. {remedy}"
    )
