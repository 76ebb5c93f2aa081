"""The options of a training step."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ms_gradaccum._checks import check_accumulation_steps, check_bool, check_choice, check_type, require
from ms_gradaccum.backend.compiled import check_compile
from ms_gradaccum.gradients.clipping import Clip, ClipChoice, check_clip
from ms_gradaccum.gradients.mixed_precision import Precision, PrecisionChoice, check_precision
from ms_gradaccum.parallel.kinds import ParallelChoice, check_kind

BadMicroBatch = Literal["skip_window", "drop"]  # The type of the argument `bad_micro_batch`.
# The advice for users who have overridden `construct` of MindSpore's cell.
STEP_REMEDY = (
    "Clip with clip=ClipByGlobalNorm(1.0), put a moving average of the weights into a callback's on_update_end(), or "
    "write the step as a loop with an Accumulator."
)


@dataclass(frozen=True)
class StepSettings:
    """The options of a training step besides its network and its optimizer, checked."""

    owner: str  # Class name used in error messages.
    accumulation_steps: int
    clip: Clip
    precision: Precision  # Includes the loss scale, which belongs to one network.
    parallel: ParallelChoice
    drop_non_finite: bool  # True if a micro batch that is not finite is left out.
    compiles: bool  # True if the user's code is compiled in PYNATIVE mode, too.
    check_loss: bool  # True if the loss is measured on the first batches, see `LossMeasurement`.

    @staticmethod
    def checked(
        owner: str,
        accumulation_steps: int = 1,
        clip: ClipChoice = None,
        mixed_precision: PrecisionChoice = None,
        parallel: ParallelChoice = "auto",
        bad_micro_batch: BadMicroBatch = "skip_window",
        compile: bool | None = None,
        check_loss: bool = True,
    ) -> "StepSettings":
        remedy = (
            "'skip_window' makes no update in a window with an Inf or a NaN, 'drop' leaves out its micro batch alone."
        )
        check_choice(owner, "bad_micro_batch", bad_micro_batch, get_args(BadMicroBatch), remedy)
        remedy = "False trains without measuring the loss of the first batches."
        return StepSettings(
            owner,
            check_accumulation_steps(owner, accumulation_steps),
            check_clip(owner, clip),
            check_precision(owner, mixed_precision),
            check_kind(owner, parallel),
            bad_micro_batch == "drop",
            check_compile(owner, compile),
            check_bool(owner, "check_loss", check_loss, remedy),
        )

    def of_sums(self) -> dict[str, Any]:
        """Return the settings that `build_reducers` takes."""
        return {"drop_non_finite": self.drop_non_finite, "dtype": self.precision.reduce_dtype}

    def agreed(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks."""
        return {
            "accumulation_steps": self.accumulation_steps,
            "clip": repr(self.clip),
            "mixed_precision": self.precision.text,
            "bad_micro_batch": self.drop_non_finite,
            "compile": self.compiles,
        }


def check_stock_arguments(owner: str, sens: object, return_grad: object) -> None:
    """Raise unless the further arguments of MindSpore's cell have their default values."""
    remedy = (
        "Give mixed_precision=FixedLossScaleManager(1024.0, False), for example, which divides the gradient by the "
        "scale again, and an optimizer without a loss_scale."
    )
    if sens is not None:
        check_type(owner, "sens", sens, (int, float), "None or 1.0", remedy)
    require(sens in (None, 1), owner, "sens", "None or 1.0", sens, remedy)
    remedy = "Take the gradients with value_and_grad, and give them to an Accumulator."
    require(not check_bool(owner, "return_grad", return_grad, remedy), owner, "return_grad", "False", True, remedy)
