"""Public names of the package. Type checkers read them here, and so does `__init__.py` when it is imported."""

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
from ms_gradaccum.gradients.norm_limit import NormSpike as NormSpike
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
from ms_gradaccum.training.window_length import BySamples as BySamples

__version__: str
