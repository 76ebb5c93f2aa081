"""Gradient accumulation for MindSpore."""

from ms_gradaccum.accumulation_config import AccumulationConfig as AccumulationConfig
from ms_gradaccum.accumulation_config import AccumulationSchedule as AccumulationSchedule
from ms_gradaccum.accumulator import Accumulator as Accumulator
from ms_gradaccum.callbacks import ProgressBar as ProgressBar
from ms_gradaccum.events import StepEvent as StepEvent
from ms_gradaccum.grad_accumulation import GradAccumulation as GradAccumulation
from ms_gradaccum.grad_clip import ClipByGlobalNorm as ClipByGlobalNorm
from ms_gradaccum.grad_clip import ClipByGroupNorm as ClipByGroupNorm
from ms_gradaccum.grad_clip import ClipByValue as ClipByValue
from ms_gradaccum.metrics_logger import MetricsLogger as MetricsLogger
from ms_gradaccum.model import Model as Model
from ms_gradaccum.parallel.data_parallel import DataParallel as DataParallel
from ms_gradaccum.parallel.hsdp import HSDP as HSDP
from ms_gradaccum.plan import TrainingPlan as TrainingPlan
from ms_gradaccum.precision import MixedPrecision as MixedPrecision
from ms_gradaccum.state.load import load_state as load_state
from ms_gradaccum.state.save import save_state as save_state
from ms_gradaccum.state.saved_state import SavedState as SavedState
from ms_gradaccum.step_output import StepOutput as StepOutput
from ms_gradaccum.step_report import StepReport as StepReport
from ms_gradaccum.step_report import StepReporter as StepReporter
from ms_gradaccum.token_mean_loss import TokenMeanLoss as TokenMeanLoss
from ms_gradaccum.train_step import TrainOneStepCell as TrainOneStepCell
from ms_gradaccum.verification.report import ParameterDifference as ParameterDifference
from ms_gradaccum.verification.report import VerifyReport as VerifyReport
from ms_gradaccum.verify import verify as verify
