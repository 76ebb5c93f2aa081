"""The options of a training step."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from mindspore import nn

from ms_gradaccum._checks import (
    LOSS_INSIDE,
    check_bool,
    check_choice,
    typed,
)
from ms_gradaccum.backend.compiled import check_compile
from ms_gradaccum.gradients.clipping import Clip, ClipChoice, check_clip
from ms_gradaccum.gradients.mixed_precision import Precision, PrecisionChoice, check_precision
from ms_gradaccum.gradients.norm_limit import NoNormLimit, SkipAbove, check_skip_above
from ms_gradaccum.parallel.kinds import ParallelChoice, check_kind
from ms_gradaccum.training.window_length import AccumulationSteps, WindowLength, check_window_length

if TYPE_CHECKING:
    from typing_extensions import Unpack

BadMicroBatch = Literal["skip_window", "drop"]  # The type of the argument `bad_micro_batch`.
_Init = TypeVar("_Init", bound=Callable[..., None])
# The advice for users who have overridden `construct` of MindSpore's cell.
STEP_REMEDY = (
    "Clip with clip=ClipByGlobalNorm(1.0), put a moving average of the weights into a callback's "
    "on_update_end(), or write the step as a loop with an Accumulator."
)


class LoopOptions(TypedDict, total=False):
    """The options that a hand-written loop shares with a training step, as users give them."""

    clip: ClipChoice
    skip_above: SkipAbove
    mixed_precision: PrecisionChoice
    parallel: ParallelChoice
    bad_micro_batch: BadMicroBatch
    compile: bool | None
    check_loss: bool


class StepOptions(LoopOptions, total=False):
    """The options of a training step."""

    accumulation_steps: AccumulationSteps


_DEFAULTS: dict[str, Any] = {
    "accumulation_steps": 1,
    "clip": None,
    "skip_above": None,
    "mixed_precision": None,
    "parallel": "auto",
    "bad_micro_batch": "skip_window",
    "compile": None,
    "check_loss": True,
}


def takes_options(kind: type) -> Callable[[_Init], _Init]:
    """Return a decorator that shows, in a constructor's signature, the options that it takes as ``**options``."""

    def show(init: _Init) -> _Init:
        hints = get_type_hints(kind)
        signature = inspect.signature(init)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=hints[name])
            for name in hints
        ]
        shown: Any = init
        shown.__signature__ = signature.replace(parameters=[*own, *options])
        del init.__annotations__["options"]
        init.__annotations__.update(hints)
        return init

    return show


def changed_options(options: StepOptions) -> list[str]:
    """Return the names of options that are not the default."""
    return [name for name, value in options.items() if value != _DEFAULTS[name]]


@dataclass(frozen=True)
class StepSettings:
    """The options of a training step, checked."""

    owner: str  # Class name used in error messages.
    window_length: WindowLength
    clip: Clip
    norm_limit: NoNormLimit  # Its norms belong to one network.
    precision: Precision  # Includes the loss scale, which belongs to one network.
    parallel: ParallelChoice
    drop_non_finite: bool  # True if a micro batch that is not finite is left out.
    compiles: bool  # True if the user's code is compiled in PYNATIVE mode, too.
    check_loss: bool  # True if the loss is measured on the first batches, see `LossMeasurement`.

    @staticmethod
    def checked(owner: str, **options: "Unpack[StepOptions]") -> "StepSettings":
        """Return the settings of a step with these ``options``."""
        every = {**_DEFAULTS, **options}
        bad_micro_batch = every["bad_micro_batch"]
        remedy = (
            "'skip_window' skips the update of a window with an Inf or a NaN, 'drop' leaves out "
            "only its micro batch."
        )
        check_choice(owner, "bad_micro_batch", bad_micro_batch, get_args(BadMicroBatch), remedy)
        remedy = "False trains without measuring the loss of the first batches."
        return StepSettings(
            owner,
            window_length=check_window_length(owner, every["accumulation_steps"]),
            clip=check_clip(owner, every["clip"]),
            norm_limit=check_skip_above(owner, every["skip_above"]),
            precision=check_precision(owner, every["mixed_precision"]),
            parallel=check_kind(owner, every["parallel"]),
            drop_non_finite=bad_micro_batch == "drop",
            compiles=check_compile(owner, every["compile"]),
            check_loss=check_bool(owner, "check_loss", every["check_loss"], remedy),
        )

    def kept_cells(self) -> tuple[nn.Cell, ...]:
        """Return the cells whose parameters belong to the state of a training."""
        return self.precision.loss_scale, self.norm_limit, self.clip

    def of_sums(self) -> dict[str, Any]:
        """Return the settings that `build_reducers` takes."""
        return {
            "clip": self.clip,
            "drop_non_finite": self.drop_non_finite,
            "dtype": self.precision.reduce_dtype,
        }

    def agreed(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks."""
        return {
            "accumulation_steps": self.window_length.as_text(),
            "clip": repr(self.clip),
            "skip_above": repr(self.norm_limit.given),
            "mixed_precision": self.precision.text,
            "bad_micro_batch": self.drop_non_finite,
            "compile": self.compiles,
        }


def check_stock_arguments(owner: str, sens: object, return_grad: object) -> None:
    """Raise unless the further arguments of MindSpore's cell have their default values."""
    is_number = isinstance(sens, (int, float)) and not isinstance(sens, bool)
    if sens is not None and not (is_number and sens == 1):
        remedy = (
            "For a loss scale give mixed_precision=FixedLossScaleManager(1024.0, False), for "
            "example."
        )
        if isinstance(sens, nn.Cell):
            remedy = LOSS_INSIDE
        elif is_number and isinstance(sens, int):
            remedy = f"Did you mean accumulation_steps={sens}? {remedy}"
        kind = ValueError if is_number else TypeError
        raise kind(
            f"For '{owner}', the argument 'sens' must be None or 1.0, but got {typed(sens)}. "
            f"{remedy}"
        )
    remedy = "Take the gradients with value_and_grad, and give them to an Accumulator."
    if check_bool(owner, "return_grad", return_grad, remedy):
        raise ValueError(
            f"For '{owner}', the argument 'return_grad' must be False, but got True. {remedy}"
        )
