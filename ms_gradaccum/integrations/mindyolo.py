"""``create_train_step_fn`` of mindyolo with this package's accumulation."""

from collections.abc import Callable
from typing import TypeAlias

from mindspore import Tensor, amp, nn, ops

from ms_gradaccum._checks import check_bool, check_choice
from ms_gradaccum.contrastive.grad_cache_loss import GradCacheLoss
from ms_gradaccum.gradients.clipping import ClipByGlobalNorm
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.training.grad_accumulation import GradAccumulation

_OWNER = "create_train_step_fn"
# The loss, terms for the log, the place of the gradients, and whether they were finite.
Report: TypeAlias = tuple[Tensor, tuple[Tensor, ...], None, Tensor]


class DetectionLoss(nn.Cell):
    """A loss of mindyolo, called with the predictions, labels and images of all rows. It returns its first number."""

    def __init__(self, loss_fn: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.loss_fn = loss_fn

    def construct(self, *tensors: Tensor) -> Tensor:
        predictions = tensors[:-2]
        labels = tensors[-2]
        # The first column numbers the images of a batch, and each process numbers its own.
        numbers = ops.arange(labels.shape[0]).astype(labels.dtype).reshape((-1, 1, 1))
        numbers = ops.broadcast_to(numbers, (-1, labels.shape[1], 1))
        labels = ops.concat((numbers, labels[:, :, 1:]), 2)
        loss: Tensor = self.loss_fn(predictions, labels, tensors[-1])[0]
        return loss.sum()


def create_train_step_fn(
    task: str,
    network: nn.Cell,
    loss_fn: nn.Cell,
    optimizer: nn.Cell,
    loss_ratio: float,
    scaler: amp.LossScaler,
    reducer: object,
    ema: nn.Cell | None = None,
    overflow_still_update: bool = False,
    ms_jit: bool = False,
    clip_grad: bool = False,
    clip_grad_value: float = 10.0,
    *,
    micro_size: int = 1,
) -> Callable[..., Report]:
    """Return a function like that of mindyolo, which trains each batch in `micro_size` micro batches.

    The positional arguments are those of mindyolo's function of the same name, and its ``Trainer`` calls what this one
    returns. `loss_ratio` and `reducer` are unused: the loss is that of the rows of all processes.

    Args:
        task (str): Only ``"detect"``.
        scaler (LossScaler): The loss scale, which mindyolo's ``Trainer`` adjusts.
        ema (Union[Cell, None]): mindyolo's moving average, updated after each update. Default: ``None``.
        overflow_still_update (bool): Unused: an Inf or a NaN in the gradient always skips the update.
        ms_jit (bool): Whether network, loss and optimizer are compiled in PYNATIVE mode too. Default: ``False``.
        clip_grad (bool): Whether the gradient is clipped to the global norm `clip_grad_value`. Default: ``False``.

    Keyword Args:
        micro_size (int): The number of micro batches of each batch (a count, not rows). Default: ``1``.

    Returns:
        Function of images and labels. It returns the loss, the terms for the log (here their sum alone), None in place
        of the gradients, and whether the gradient was finite.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `task` is another one; at a call, if ``accumulate`` of the ``Trainer`` is not 1.
    """
    check_choice(_OWNER, "task", task, ("detect",), "Masks are not supported.")
    clip = None
    if check_bool(_OWNER, "clip_grad", clip_grad, "The limit is clip_grad_value."):
        clip = ClipByGlobalNorm(clip_grad_value)
    # The same number, which only the Trainer changes.
    loss_scale = amp.StaticLossScaler(1.0)
    loss_scale.scale_value = scaler.scale_value
    loss_cell = GradCacheLoss(network, DetectionLoss(loss_fn), labels=2)
    step = TrainOneStepCell(
        GradAccumulation(loss_cell, micro_size),
        optimizer,
        clip=clip,
        mixed_precision=loss_scale,
        compile=ms_jit or None,
    )

    def train_step_fn(images: Tensor, labels: Tensor, optimizer_update: bool = True) -> Report:
        if not optimizer_update:
            raise ValueError(
                f"For '{_OWNER}', mindyolo's setting 'accumulate' must be 1, but got more. Give a "
                f"larger per_batch_size and micro_size={micro_size}."
            )
        output = step(images, labels, images)
        if ema is not None and output.updated:
            ema.update()
        terms = (output.loss / output.weight,)
        return output.loss, terms, None, ops.logical_not(output.overflow)

    return train_step_fn
