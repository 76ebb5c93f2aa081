"""The wrapper ``AccumulatedStep`` in the registry of mindformers. Importing this file registers it."""

from mindformers.core.context.build_context import is_legacy_model
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import check_bool
from ms_gradaccum.backend.arithmetic import Tensors
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.integrations.scale_sense import ScaleSense, precision_of
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.semi_auto import in_semi_auto
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.step_output import named

_OWNER = "AccumulatedStep"
# Arguments that mindformers' trainer passes to every wrapper and that are not needed here.
_UNUSED = ("parallel_config", "lr_scheduler")
# Settings that must be off, with the remedy.
_OFF = {
    "local_norm": "The norm is that of the window's mean gradient over all parameters.",
    "grouped_lr_scheduler": (
        "Give one lr_schedule: the monitor reads grouped rates from mindformers' own step."
    ),
    "print_separate_loss": "The report has the sum of the terms.",
}


class SummedLoss(nn.Cell):
    """Sum of the loss terms of a model without ``use_legacy``: four means or, ``per_token``, six sums and counts."""

    def __init__(self, network: nn.Cell, per_token: bool) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.per_token = per_token

    def construct(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        terms = self.network(*inputs)
        if self.per_token:
            # Next-token loss and its tokens, the same for further tokens, and two terms multiplied by tokens.
            return terms[0] + terms[2] + terms[4] + terms[5], terms[1]
        return terms[0] + terms[1] + terms[2] + terms[3]


class AccumulatedStep(TrainOneStepCell):
    r"""Train a network of mindformers with each batch of its dataset split into `micro_size` micro batches.

    Name it in ``runner_wrapper`` of the YAML file, in place of ``MFTrainOneStepCell``.

    Args:
        network, optimizer (Cell): The network and the optimizer of mindformers' trainer.
        micro_size (int): The number of micro batches of one batch (a count, not rows). Default: ``1``.
        use_clip_grad (bool): Whether the window's mean gradient is clipped to the global norm `max_grad_norm`.
        scale_sense (Union[int, float, Tensor, Cell]): The loss scale: a number, or a ``FixedLossScaleUpdateCell`` or
            ``DynamicLossScaleUpdateCell``, which is adjusted once per window. Default: ``1.0``.
        calculate_per_token_loss (bool): mindformers' setting: the network returns the sum of the loss and the number
            of tokens, and the loss is the mean over all tokens of the batch. Default: ``False``.
        use_skip_data_by_global_norm (bool): mindformers' setting: a batch whose global norm before clipping is above
            `global_norm_spike_threshold` makes no update. Default: ``False``.

    Inputs:
        - **\*inputs** - One batch, as `network` takes it.

    Outputs:
        Tuple of 5, as ``MFLossMonitor`` reads it: the loss, whether an Inf or a NaN has skipped the update, the loss
        scale of the next batch, the learning rate, and the global norm before clipping.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range or a setting of ``MFTrainOneStepCell`` that this step lacks, or the
            compiler partitions the step (semi-auto-parallel).

    Supported Platforms:
        ``GPU`` ``CPU``
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        micro_size: int = 1,
        use_clip_grad: bool = False,
        max_grad_norm: float = 1.0,
        scale_sense: ScaleSense = 1.0,
        calculate_per_token_loss: bool | None = False,
        use_skip_data_by_global_norm: bool | None = False,
        global_norm_spike_threshold: float = 1.0,
        **settings: object,
    ) -> None:
        is_legacy = is_legacy_model()
        _check_settings(settings, is_legacy)
        # The trainer gives None for settings that the YAML file lacks.
        per_token = calculate_per_token_loss or False
        check_bool(
            _OWNER,
            "calculate_per_token_loss",
            per_token,
            "True is for a network that returns (loss_sum, weight).",
        )
        clip = None
        if check_bool(_OWNER, "use_clip_grad", use_clip_grad, "The limit is max_grad_norm."):
            clip = ClipByGlobalNorm(max_grad_norm)
        skip_above = None
        if use_skip_data_by_global_norm:
            skip_above = global_norm_spike_threshold
        loss_cell = network if is_legacy else SummedLoss(network, per_token)
        loss_cell = GradAccumulation(loss_cell, micro_size, weighted=per_token)
        precision = precision_of(_OWNER, scale_sense)
        super().__init__(
            loss_cell, optimizer, clip=clip, skip_above=skip_above, mixed_precision=precision
        )

    def __call__(self, *args: object, **kwargs: object) -> Tensors:  # type: ignore[override]
        return self.shown(tuple(super().__call__(*args, **kwargs)._asdict().values()))

    def shown(self, items: Tensors) -> Tensors:
        """Return the outputs in the order of mindformers' monitors."""
        report = named(items)
        # mindformers saves this scale, and resumes with it.
        scale = ops.depend(self.body.loss_scale.value(), items)
        rate = report["learning_rate"]
        if rate.ndim > 0:  # For several groups, the last rate.
            rate = rate[-1]
        return report["loss"], report["overflow"], scale, rate, report["grad_norm"]


def _check_settings(settings: dict[str, object], is_legacy: bool) -> None:
    if in_semi_auto():
        raise ValueError(
            f"For '{_OWNER}', the argument 'parallel_mode' must be stand-alone or data parallel, "
            f"but got semi-auto-parallel. There MFTrainOneStepCell accumulates by itself: use "
            f"gradient_accumulation_steps."
        )
    unused = set(_UNUSED)
    if is_legacy:
        # A legacy model returns one loss, despite the trainer's default.
        unused.add("print_separate_loss")
    for name, value in settings.items():
        if name not in unused and (value or name not in _OFF):
            remedy = _OFF.get(
                name, "It takes micro_size, use_clip_grad, max_grad_norm and scale_sense."
            )
            raise ValueError(
                f"For '{_OWNER}', the argument '{name}' must be left out, but got {value!r}. "
                f"{remedy}"
            )


MindFormerRegister.register_cls(AccumulatedStep, module_type=MindFormerModuleType.WRAPPER)
