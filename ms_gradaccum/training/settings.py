"""The settings of a training step, whoever takes them."""

from dataclasses import dataclass
from typing import Any

from mindspore import nn

from ms_gradaccum._checks import argument_error, check_accumulation_steps, check_bool, typed
from ms_gradaccum.backend.compiled import check_compile
from ms_gradaccum.gradients.clipping import check_clip
from ms_gradaccum.gradients.mixed_precision import Precision, check_precision
from ms_gradaccum.gradients.non_finite import check_bad_micro_batch
from ms_gradaccum.parallel.kinds import check_kind

# For those who have overridden `construct` of MindSpore's cell.
STEP_REMEDY = (
    "Clip with clip=ClipByGlobalNorm(1.0), put a moving average of the weights into a callback's on_update_end(), or "
    "write the step as a loop with an Accumulator."
)


@dataclass(frozen=True)
class StepSettings:
    """The options of a training step besides its network and its optimizer.

    Attributes:
        owner: Class name used in error messages.
        accumulation_steps: Batches of one update.
        clip: Clipping of the mean gradient.
        precision: What computes in 16 bits, and the loss scale, which belongs to one network.
        parallel: What the caller has said of several processes.
        drop_non_finite: Whether a micro batch that is not finite is left out.
        compiles: Whether code of the user's is compiled in PYNATIVE mode too.
        check_loss: True if the first batches are measured, see `LossCheck`.
    """

    owner: str
    accumulation_steps: int
    clip: nn.Cell
    precision: Precision
    parallel: Any
    drop_non_finite: bool
    compiles: bool
    check_loss: bool

    @staticmethod
    def checked(
        owner: str,
        *,
        accumulation_steps: Any = 1,
        clip: Any = None,
        mixed_precision: Any = None,
        parallel: Any = "auto",
        bad_micro_batch: Any = "skip_window",
        compile: Any = None,
        check_loss: Any = True,
    ) -> "StepSettings":
        """Return the settings that these arguments give, or raise."""
        return StepSettings(
            owner,
            check_accumulation_steps(owner, accumulation_steps),
            check_clip(owner, clip),
            check_precision(owner, mixed_precision),
            check_kind(owner, parallel),
            check_bad_micro_batch(owner, bad_micro_batch),
            check_compile(owner, compile),
            check_bool(
                owner, "check_loss", check_loss, "False trains without measuring the loss of the first batches."
            ),
        )

    @property
    def adds_batches(self) -> bool:
        """True if a window may have several batches."""
        return self.accumulation_steps > 1

    def of_sums(self) -> dict[str, Any]:
        """Return the arguments of `build_reducers` that are settings."""
        return {"drop_non_finite": self.drop_non_finite, "dtype": self.precision.reduce_dtype}

    def agreed(self) -> dict[str, Any]:
        """Return what all ranks must have been told alike."""
        return {
            "accumulation_steps": self.accumulation_steps,
            "clip": repr(self.clip),
            "mixed_precision": self.precision.text,
            "bad_micro_batch": self.drop_non_finite,
            "compile": self.compiles,
        }


def check_stock_arguments(owner: str, sens: Any, return_grad: Any) -> None:
    """Raise unless the further arguments of MindSpore's cell ask for what they do by default."""
    remedy = (
        "Give mixed_precision=FixedLossScaleManager(1024.0, False), for example, which divides the gradient by the "
        "scale again, and an optimizer without a loss_scale."
    )
    rule = "None or 1.0"
    if sens is not None and (isinstance(sens, bool) or not isinstance(sens, (int, float))):
        raise TypeError(argument_error(owner, "sens", rule, typed(sens), remedy))
    if sens is not None and sens != 1:
        raise ValueError(argument_error(owner, "sens", rule, sens, remedy))
    remedy = "Take the gradients with value_and_grad, and give them to an Accumulator."
    if check_bool(owner, "return_grad", return_grad, remedy):
        raise ValueError(argument_error(owner, "return_grad", "False", True, remedy))
