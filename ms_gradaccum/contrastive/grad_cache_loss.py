"""A loss over all rows of a batch together.

After L. Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021.
"""

from collections.abc import Callable
from typing import NoReturn

from mindspore import Tensor, nn

from ms_gradaccum._checks import FrozenAfterInit, check_cell, check_construct, check_int
from ms_gradaccum.backend.arithmetic import Tensors
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.batch.split import BatchAxis
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.whole_batch_loss import BatchSettings, WholeBatchLoss
from ms_gradaccum.contrastive.cache_pass import CachePass
from ms_gradaccum.contrastive.cached_loss import OUTPUT_REMEDY, CachedLoss, widened
from ms_gradaccum.parallel.reducer import GradientReducer

_OWNER = "GradCacheLoss"


class GradCacheLoss(FrozenAfterInit, WholeBatchLoss):
    r"""A network and a loss that looks at all rows of a batch together: contrastive, ranking, correlation, batch Dice.

    Inside :class:`GradAccumulation` it is trained with the gradient of the whole batch, over all processes, with the
    memory of a micro batch: a first pass keeps only the outputs of all micro batches, and the gradient of `loss_fn`
    with respect to them starts the backward passes of a second pass.

    Anywhere else, for example in evaluation, it is an ordinary loss cell. With `accumulation_steps` the loss of the
    window is the mean of its batches' losses, weighted by their rows.

    Parameters that the forward pass changes (averages, counters) are changed once per micro batch. If the second pass
    does not reproduce the outputs of the first one, for example because of Dropout, the training step raises a
    RuntimeError. :class:`ReplayDropout` draws the same masks again.

    Args:
        backbone (Cell): Network that returns a tensor or a tuple of tensors, with the rows of its inputs on axis 0.
            Gradients flow through floating-point outputs. 16-bit outputs are passed to `loss_fn` in float32.
        loss_fn (Cell): Called with the outputs of `backbone` and the last `labels` inputs, of all rows together. It
            returns a floating-point scalar, the loss of the batch, and may have parameters.
        labels (int): Number of inputs, the last ones, that go to `loss_fn` instead of `backbone`. Default: ``0``.

    Inputs:
        - **\*inputs** - Inputs of `backbone`, and after them those of `loss_fn`.

    Outputs:
        The loss that `loss_fn` returns.

    Raises:
        TypeError: If an argument has the wrong type, a subclass its own `construct`, or a backbone returns no tensors.
        ValueError: If `labels` is negative, or all of the inputs; later, if an output lacks the rows on axis 0.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_gradaccum import ContrastiveLoss, GradAccumulation, GradCacheLoss, TrainOneStepCell
        >>> class Towers(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.image, self.text = nn.Dense(8, 4), nn.Dense(6, 4)
        ...     def construct(self, image, text):
        ...         return self.image(image), self.text(text)
        >>> network = GradCacheLoss(Towers(), ContrastiveLoss())
        >>> optimizer = nn.SGD(network.trainable_params(), 0.1)
        >>> train_step = TrainOneStepCell(GradAccumulation(network, micro_size=4), optimizer)
        >>> image, text = (Tensor(np.random.rand(16, length).astype(np.float32)) for length in (8, 6))
        >>> output = train_step(image, text)  # 16 rows, each with 15 negatives, in micro batches of 4
        >>> print(output.weight)
        16.0
    """

    __call__: Callable[..., Tensor]

    def __init__(self, backbone: nn.Cell, loss_fn: nn.Cell, labels: int = 0) -> None:
        super().__init__(auto_prefix=False)
        check_construct(
            _OWNER, type(self), GradCacheLoss, "Put what it does into backbone or loss_fn."
        )
        self.backbone = check_cell(
            _OWNER, "backbone", backbone, "Give the network that returns representations."
        )
        self.loss_fn = check_cell(
            _OWNER, "loss_fn", loss_fn, "Give the cell that is called with all of them."
        )
        self.labels = check_int(
            _OWNER, "labels", labels, "It counts the last inputs, which go to loss_fn.", least=0
        )
        self._get_attr_from_cell(backbone)
        self._is_built = True

    def construct(self, *inputs: object) -> Tensor:
        end = len(inputs) - self.labels
        if end < 1:
            _refuse_inputs(len(inputs), self.labels)
        return self.loss_fn(*self.outputs(inputs[:end]), *inputs[end:])

    def preparation(
        self,
        batch_axis: BatchAxis,
        settings: BatchSettings,
        like: nn.Cell,
        reducer: GradientReducer,
    ) -> CachePass:
        return CachePass(self, batch_axis, settings, like, reducer)

    def prepared_loss(
        self,
        structure: SequenceOf | None,
        weighted: object,
        losses: object,
    ) -> CachedLoss:
        if weighted:
            _refuse_setting("weighted", False, weighted)
        if losses is not None:
            _refuse_setting("losses", None, losses)
        return CachedLoss(self, structure)

    def around(self, backbone: nn.Cell) -> "GradCacheLoss":
        return GradCacheLoss(backbone, self.loss_fn, self.labels)

    def outputs_of(self, structure: SequenceOf, *tensors: Tensor) -> Tensors:
        """Return `outputs` for the tensors of nested inputs."""
        return self.outputs(structure.rebuild(tensors))

    def outputs(self, inputs: tuple[object, ...]) -> Tensors:
        """Return the outputs of the backbone in the form that `loss_fn` takes."""
        returned = self.backbone(*inputs)
        if not isinstance(returned, (tuple, list)):
            returned = (returned,)
        outputs: Tensors = ()
        for output in returned:
            if not isinstance(output, Tensor):
                _refuse_output()
            outputs += (widened(output),)
        return outputs


def _refuse_setting(name: str, value: object, got: object) -> NoReturn:
    raise ValueError(
        f"For 'GradAccumulation', the argument '{name}' must be {value} for a {_OWNER}, but got "
        f"{got!r}. Its loss_fn returns one number, the loss of the batch, which counts by its rows."
    )


@primexpr
def _refuse_inputs(inputs: int, labels: int) -> None:
    raise ValueError(
        f"For '{_OWNER}', there must be more inputs than the {labels} labels, but got {inputs}. "
        f"Give the inputs of the backbone first, and then the labels."
    )


@primexpr
def _refuse_output() -> None:
    raise TypeError(
        f"For '{_OWNER}', the backbone must return a tensor or a tuple of tensors, but got "
        f"something else. {OUTPUT_REMEDY}"
    )
