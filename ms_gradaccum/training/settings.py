"""The settings of a training step, whoever takes them."""

from dataclasses import dataclass
from typing import Any

from mindspore import nn

from ms_gradaccum._checks import check_accumulation_steps, check_bool
from ms_gradaccum.backend.compiled import check_compile
from ms_gradaccum.gradients.clipping import check_clip
from ms_gradaccum.gradients.mixed_precision import Precision, check_precision
from ms_gradaccum.gradients.non_finite import check_bad_micro_batch
from ms_gradaccum.parallel.factory import check_kind, check_parallel


@dataclass(frozen=True)
class StepSettings:
    """What a training step is told beside its network and its optimizer.

    Attributes:
        owner: Whose name errors begin with.
        accumulation_steps: Batches of one update.
        clip: Clipping of the mean gradient.
        precision: What computes in 16 bits, and the loss scale, which belongs to one network.
        parallel: What the caller has said of several processes.
        drops: Whether a micro batch that is not finite is left out.
        compiles: Whether code of the user's is compiled in PYNATIVE mode too.
        notes_squares: Whether the squares of the gradients of micro batches are noted, for the noise scale.
    """

    owner: str
    accumulation_steps: int
    clip: nn.Cell
    precision: Precision
    parallel: Any
    drops: bool
    compiles: bool
    notes_squares: bool

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
        noise_scale: Any = False,
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
            check_bool(owner, "noise_scale", noise_scale, "True reports how noisy the gradient is."),
        )

    def kind_for(self, network: nn.Cell) -> Any:
        """Return the kind of parallelism for a network as the user gave it, or None for one process."""
        return check_parallel(self.owner, self.parallel, network)

    def agreed(self) -> dict[str, Any]:
        """Return what all ranks must have been told alike."""
        return {
            "accumulation_steps": self.accumulation_steps,
            "clip": repr(self.clip),
            "mixed_precision": self.precision.text,
            "bad_micro_batch": self.drops,
            "noise_scale": self.notes_squares,
        }
