"""Gradient accumulation for MindSpore."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_gradaccum._checks import GradAccumulationWarning as GradAccumulationWarning
    from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss as TokenMeanLoss
    from ms_gradaccum.checkpoint.contents import SavedState as SavedState
    from ms_gradaccum.checkpoint.state import load_state as load_state
    from ms_gradaccum.checkpoint.state import save_state as save_state
    from ms_gradaccum.checkpoint.state_checkpoint import StateCheckpoint as StateCheckpoint
    from ms_gradaccum.contrastive.contrastive_loss import ContrastiveLoss as ContrastiveLoss
    from ms_gradaccum.contrastive.grad_cache_loss import GradCacheLoss as GradCacheLoss
    from ms_gradaccum.contrastive.replay_dropout import ReplayDropout as ReplayDropout
    from ms_gradaccum.gradients.clipping import ClipByGlobalNorm as ClipByGlobalNorm
    from ms_gradaccum.gradients.clipping import ClipByGroupNorm as ClipByGroupNorm
    from ms_gradaccum.gradients.clipping import ClipByValue as ClipByValue
    from ms_gradaccum.gradients.mixed_precision import MixedPrecision as MixedPrecision
    from ms_gradaccum.loops.accumulator import Accumulator as Accumulator
    from ms_gradaccum.loops.ema import EMA as EMA
    from ms_gradaccum.loops.model import Model as Model
    from ms_gradaccum.loops.schedule import AccumulationConfig as AccumulationConfig
    from ms_gradaccum.loops.train_step import TrainOneStepCell as TrainOneStepCell
    from ms_gradaccum.parallel.kinds import HSDP as HSDP
    from ms_gradaccum.parallel.kinds import DataParallel as DataParallel
    from ms_gradaccum.parallel.kinds import Reduced as Reduced
    from ms_gradaccum.tools.micro_size_finder import find_micro_size as find_micro_size
    from ms_gradaccum.tools.plan import TrainingPlan as TrainingPlan
    from ms_gradaccum.tools.reporting.metrics_logger import MetricsLogger as MetricsLogger
    from ms_gradaccum.tools.reporting.progress_bar import ProgressBar as ProgressBar
    from ms_gradaccum.tools.reporting.step_report import StepReport as StepReport
    from ms_gradaccum.tools.reporting.step_report import StepReporter as StepReporter
    from ms_gradaccum.tools.verification.report import CompileReport as CompileReport
    from ms_gradaccum.tools.verification.report import ParameterDifference as ParameterDifference
    from ms_gradaccum.tools.verification.report import VerifyReport as VerifyReport
    from ms_gradaccum.tools.verification.verify import verify as verify
    from ms_gradaccum.training.events import StepEvent as StepEvent
    from ms_gradaccum.training.grad_accumulation import GradAccumulation as GradAccumulation
    from ms_gradaccum.training.step_output import StepOutput as StepOutput

__version__ = "0.2.0"

# The public names of each module, which is imported when one of them is first used.
_NAMES = {
    "_checks": "GradAccumulationWarning",
    "batch.token_mean_loss": "TokenMeanLoss",
    "checkpoint.state": "load_state save_state",
    "checkpoint.contents": "SavedState",
    "checkpoint.state_checkpoint": "StateCheckpoint",
    "contrastive.contrastive_loss": "ContrastiveLoss",
    "contrastive.grad_cache_loss": "GradCacheLoss",
    "contrastive.replay_dropout": "ReplayDropout",
    "gradients.clipping": "ClipByGlobalNorm ClipByGroupNorm ClipByValue",
    "gradients.mixed_precision": "MixedPrecision",
    "loops.accumulator": "Accumulator",
    "loops.ema": "EMA",
    "loops.model": "Model",
    "loops.schedule": "AccumulationConfig",
    "parallel.kinds": "HSDP DataParallel Reduced",
    "tools.plan": "TrainingPlan",
    "tools.micro_size_finder": "find_micro_size",
    "tools.reporting.metrics_logger": "MetricsLogger",
    "tools.reporting.progress_bar": "ProgressBar",
    "tools.reporting.step_report": "StepReport StepReporter",
    "tools.verification.report": "CompileReport ParameterDifference VerifyReport",
    "tools.verification.verify": "verify",
    "training.events": "StepEvent",
    "training.grad_accumulation": "GradAccumulation",
    "training.step_output": "StepOutput",
    "loops.train_step": "TrainOneStepCell",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # For a type checker, a module with __getattr__ has any name.

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted(_MODULES)

    __all__ = list(_MODULES)
