"""The training step of mindone's trainers, and the loss of its transformers as a loss cell."""

from collections.abc import Sequence

from mindspore import Tensor, nn

from ms_gradaccum._checks import check_bool, check_cell
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.integrations.scale_sense import ScaleSense, precision_of, scale_taken_out
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.kinds import ParallelChoice
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.settings import BadMicroBatch

_OWNER = "train_step"


class ModelLoss(nn.Cell):
    r"""Loss cell around a model of ``mindone.transformers``, which computes its loss from the labels.

    Args:
        model (Cell): The model. It is called with keywords and ``return_dict=False``, and returns its loss first.
        columns (Sequence[str]): The model's argument names for the tensors of a batch, in order, for example
            ``("input_ids", "attention_mask", "labels")``.

    Inputs:
        - **\*inputs** - One batch: a tensor for each of `columns`.

    Outputs:
        The loss.

    Raises:
        TypeError: If `model` is not a Cell or `columns` are no names.

    Supported Platforms:
        ``GPU`` ``CPU``
    """

    def __init__(self, model: nn.Cell, columns: Sequence[str]) -> None:
        super().__init__(auto_prefix=False)
        self.model = check_cell("ModelLoss", "model", model, "Give the model itself.")
        self.columns = tuple(columns)
        if (
            isinstance(columns, str)
            or not columns
            or not all(isinstance(name, str) for name in columns)
        ):
            raise TypeError(
                f"For 'ModelLoss', the argument 'columns' must be the names of the model's inputs, "
                f"but got {columns!r}. For example ('input_ids', 'labels')."
            )

    def construct(self, *inputs: Tensor) -> Tensor:
        batch = {}
        for name, value in zip(self.columns, inputs):
            batch[name] = value
        loss: Tensor = self.model(**batch, return_dict=False)[0]
        return loss


def train_step(
    network: nn.Cell,
    optimizer: nn.Cell,
    scale_sense: ScaleSense = 1.0,
    ema: None = None,
    updates: int = 0,
    drop_overflow_update: bool = True,
    gradient_accumulation_steps: int = 1,
    clip_grad: bool = False,
    clip_norm: float = 1.0,
    verbose: bool = False,
    zero_helper: None = None,
    *,
    micro_size: int = 1,
    parallel: ParallelChoice = "auto",
    bad_micro_batch: BadMicroBatch = "skip_window",
    compile: bool | None = None,
) -> TrainOneStepCell:
    """Return the training step for mindone's trainers, in place of ``TrainOneStepWrapper``.

    The positional arguments are those of that class in mindone 0.5.0; `updates` and `verbose` are unused there, too.

    Args:
        network (Cell): The loss cell, for example a :class:`ModelLoss`.
        scale_sense (Union[int, float, Tensor, Cell]): The loss scale: a number, or a ``FixedLossScaleUpdateCell`` or
            ``DynamicLossScaleUpdateCell``, which is adjusted once per window. Default: ``1.0``.
        ema (None): Only None: :class:`ms_gradaccum.EMA` is a callback. Default: ``None``.
        drop_overflow_update (bool): Whether an Inf or a NaN in a window's gradient skips its update; always with a
            dynamic scale. Default: ``True``.
        gradient_accumulation_steps (int): Number of batches (calls) of one update. Default: ``1``.
        clip_grad (bool): Whether the window's mean gradient is clipped to the global norm `clip_norm`.
        zero_helper (None): Only None: `parallel` determines what is sharded.

    Keyword Args:
        micro_size (int): The number of micro batches of each batch (a count, not rows). Default: ``1``.
        parallel, bad_micro_batch, compile (optional): As of :class:`ms_gradaccum.TrainOneStepCell`.

    Returns:
        :class:`ms_gradaccum.TrainOneStepCell`, which returns loss, overflow and loss scale first, as mindone's does.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or `ema` or `zero_helper` is given.

    Supported Platforms:
        ``GPU`` ``CPU``
    """
    remedies = {
        "ema": "Give an ms_gradaccum.EMA to add_callback() of the step.",
        "zero_helper": "parallel=HSDP() shares the optimizer's state among the processes.",
    }
    for name, value in (("ema", ema), ("zero_helper", zero_helper)):
        if value is not None:
            got = type(value).__name__
            raise ValueError(
                f"For '{_OWNER}', the argument '{name}' must be None, but got {got}. "
                f"{remedies[name]}"
            )
    clip = None
    if check_bool(_OWNER, "clip_grad", clip_grad, "The limit is clip_norm."):
        clip = ClipByGlobalNorm(clip_norm)
    drops = check_bool(
        _OWNER,
        "drop_overflow_update",
        drop_overflow_update,
        "It skips windows with an Inf or a NaN.",
    )
    with scale_taken_out():
        return TrainOneStepCell(
            GradAccumulation(network, micro_size),
            optimizer,
            accumulation_steps=gradient_accumulation_steps,
            clip=clip,
            mixed_precision=precision_of(_OWNER, scale_sense, drops),
            parallel=parallel,
            bad_micro_batch=bad_micro_batch,
            compile=compile,
        )
