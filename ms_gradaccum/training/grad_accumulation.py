"""A loss cell that is fed in micro batches."""

import inspect
from collections.abc import Callable
from functools import partialmethod
from typing import Any, Literal, NoReturn

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import functional as F
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import (
    FrozenAfterInit,
    check_cell,
    check_choice,
    check_construct,
    check_micro_size,
    check_type,
    refuse_nameless,
    refuse_unknown,
)
from ms_gradaccum.backend.arithmetic import Tensors
from ms_gradaccum.backend.compiled import warn_in_graph
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.optimizers import OPTIMIZERS
from ms_gradaccum.batch.arguments import Args, Kwargs, how_to_name
from ms_gradaccum.batch.split import (
    BatchAxis,
    SplitBatch,
    check_batch_axis,
    split_batch,
    split_shapes,
)
from ms_gradaccum.batch.structure import SequenceOf
from ms_gradaccum.batch.token_limit import Lengths, TokenLimit
from ms_gradaccum.batch.weighted_loss import Losses, MeanWeight, OwnWeight, RowWeight, WeightedLoss
from ms_gradaccum.batch.whole_batch_loss import BatchSettings, Preparation, WholeBatchLoss
from ms_gradaccum.gradients.buffer import reciprocal
from ms_gradaccum.gradients.mixed_precision import Precision
from ms_gradaccum.gradients.network_precision import in_precision

_OWNER = "GradAccumulation"
# Cells of MindSpore that split a batch themselves, and the advice for each.
_OF_MINDSPORE = ("GradAccumulation", "GradAccumulationCell")
_SPLIT_THEMSELVES = {
    **dict.fromkeys(
        _OF_MINDSPORE, "Put the GradAccumulation of ms_gradaccum around the loss cell in its place."
    ),
    "PipelineCell": "Give the cell inside it; only MindSpore's own step trains pipelines.",
    "MicroBatchInterleaved": "Give the cell inside it, and a larger micro_size for less memory.",
}
_OTHER_STEP = (
    "For 'GradAccumulation', the train cell around it is not one of ms_gradaccum: the gradient is "
    "right, but the activations of all micro batches stay in memory. Write 'from ms_gradaccum "
    "import Model' (or TrainOneStepCell)."
)
_LOSSES_REMEDY = (
    "'sum' trains the sum of all losses, 'first' only the first; a tuple names the losses after "
    "the first, which is trained alone."
)
# What the network returns: a mean over rows, a sum and its weight, or a mean and its weight.
_WEIGHTED_REMEDY = (
    "True is for a network that returns (loss_sum, weight), 'mean' for (loss_mean, weight)."
)
Weighted = bool | Literal["mean"]


class GradAccumulation(FrozenAfterInit, nn.Cell):
    r"""Feed a loss cell its batch in micro batches, so that a batch needs the memory of one micro batch.

    Trained by :class:`TrainOneStepCell` or :class:`Model`, a batch makes one update, with the gradient that the whole
    batch has. The interface is that of ``mindspore.parallel.nn.GradAccumulation``, whose `micro_size` is also a count.

    Args:
        network (Cell): Loss cell. It takes the inputs of this cell and returns a scalar floating-point mean loss over
            its rows, or a tuple that starts with one. Outputs that are no scalars (e.g. logits) are ignored.
        micro_size (Union[int, str]): The number of micro batches that one batch is split into (a count, not rows). If
            `micro_size` does not divide the rows, the first micro batches have one row more, and each counts
            by its rows. A batch of fewer rows is split into single rows. If memory runs out in the first batch of a
            window, that batch and those after it have twice as many, and a warning says so; ``"auto"`` begins with 1.

    Keyword Args:
        weighted (Union[bool, str]): If ``True``, `network` returns `(loss_sum, weight)`, two scalars, and each micro
            batch counts by its weight (for example its number of tokens; not negative). If ``"mean"``, it returns
            `(loss_mean, weight)`, a mean over `weight` tokens; a micro batch of weight 0 counts for nothing, though
            its mean is 0 / 0. If ``False``, each counts by its rows. :class:`TokenMeanLoss` is always weighted.
            Default: ``False``.
        losses (Union[str, tuple[str], None]): Treatment of further floating-point scalars that `network` returns:
            ``"sum"`` trains the sum of them all, ``"first"`` only the first, and ``None`` refuses them. A tuple names
            those after the first, which is trained alone; without names there are at most 64. The mean of each over
            the window, weighted as the loss, is in ``StepOutput.other_losses``. Default: ``None``.
        batch_axis (Union[int, None, tuple, dict]): Axis of the rows: one for all inputs, or one entry per argument of
            the network, ``None`` for an input that goes whole into each micro batch. For an input that is a tuple or a
            dict, one entry for all its tensors, or a tuple or dict of entries. Tensors without axes and values that
            are no tensors are never split. Default: ``0``.

    Inputs:
        - **\*inputs** - Inputs of `network`: tensors, tuples, lists and dicts of them, Python values.

    Outputs:
        In training, the weighted mean loss over all micro batches, a float32 scalar, differentiable as one graph.
        In evaluation, the output of `network` for the whole batch.

    Raises:
        TypeError: If a subclass has its own `construct`, `network` is not a Cell, `micro_size` not an int, `weighted`
            neither a bool nor a str, or `batch_axis` holds anything but ints and None.
        ValueError: If `micro_size` is less than 1 or given with `micro_tokens`, `losses` is none of the above, inputs
            have different numbers of rows or none, a row has more than `micro_tokens` tokens, or `network` returns
            something else than described.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import GradAccumulation, Model
        >>> network = nn.Dense(16, 10)
        >>> loss_cell = GradAccumulation(nn.WithLossCell(network, nn.CrossEntropyLoss()), 4)
        >>> model = Model(loss_cell, optimizer=nn.SGD(network.trainable_params(), 1e-2))
    """

    __call__: Callable[..., Tensor | Tensors]
    _obeyed = {"micro_size": check_micro_size}
    # Class name used in messages about a batch: the step's name if the user gave the step a plain loss cell.
    owner = _OWNER

    def _register(self, name: str, *hooks: Callable[..., object], **settings: object) -> object:
        """Register a hook on the network, because batches bypass the cell around it."""
        return getattr(self.network, name)(*hooks, **settings)

    register_forward_pre_hook = partialmethod(_register, "register_forward_pre_hook")
    register_forward_hook = partialmethod(_register, "register_forward_hook")
    register_backward_pre_hook = partialmethod(_register, "register_backward_pre_hook")
    register_backward_hook = partialmethod(_register, "register_backward_hook")

    def __init__(
        self,
        network: nn.Cell,
        micro_size: int | Literal["auto"] | None = None,
        *others: NoReturn,
        micro_tokens: int | None = None,
        lengths: Lengths | None = None,
        length_axis: BatchAxis = 1,
        weighted: Weighted = False,
        batch_axis: BatchAxis = 0,
        losses: Losses | None = None,
        **unknown: NoReturn,
    ) -> None:
        super().__init__(auto_prefix=False)
        refuse_unknown(_OWNER, GradAccumulation.__init__, unknown)
        remedy = "Move its code into the construct() of the loss cell."
        check_construct(_OWNER, type(self), GradAccumulation, remedy)
        remedy = "Wrap the network and its loss, for example in nn.WithLossCell."
        self.network = network = check_cell(_OWNER, "network", network, remedy)
        _check_inside(network)
        self._signature = inspect.signature(network.construct)
        self.token_limit: TokenLimit | None = None
        self.micro_size: int | None = None
        if micro_tokens is None:
            self.micro_size = check_micro_size(micro_size)
            _check_without_tokens(lengths, length_axis)
        else:
            _check_without_size(micro_size, network)
            self.token_limit = TokenLimit.checked(
                micro_tokens, lengths, length_axis, self.argument_names
            )
            self._obeyed = {}
        refuse_nameless(_OWNER, "micro_size", others)
        self.weighted = _check_weighted(weighted, getattr(network, "returns_weight", False))
        _check_losses(losses, self.weighted)
        self.losses = losses
        # True if the loss is no sum over micro batches, so that each batch is prepared for them.
        self.needs_all_rows = isinstance(network, WholeBatchLoss)
        self.batch_axis = check_batch_axis(batch_axis)
        self.weighted_loss = self.loss_of()
        self._get_attr_from_cell(network)
        self._is_built = True

    def loss_of(self, structure: SequenceOf | None = None) -> WeightedLoss:
        """Return the loss of a micro batch as (sum, weight), for inputs of this structure."""
        if self.needs_all_rows:
            loss: WeightedLoss = self.network.prepared_loss(structure, self.weighted, self.losses)
            return loss
        return self.whole_loss_of(structure)

    def whole_loss_of(self, structure: SequenceOf | None = None) -> WeightedLoss:
        """Return the loss of `network` as (sum, weight), for inputs of this structure."""
        kinds: dict[Weighted, type[WeightedLoss]] = {
            False: RowWeight,
            True: OwnWeight,
            "mean": MeanWeight,
        }
        return kinds[self.weighted](self.network, structure, self.losses)

    def preparation(self, settings: BatchSettings, like: nn.Cell, reducer: nn.Cell) -> Preparation:
        """Return the work of a step with these settings on a batch before and after its micro steps, as ``like``."""
        if self.needs_all_rows:
            preparation: Preparation = self.network.preparation(
                self.batch_axis, settings, like, reducer
            )
            return preparation
        return Preparation()

    def with_loss(self, loss_fn: nn.Cell) -> "GradAccumulation":
        """Return this cell around `network` followed by `loss_fn`, which takes its output and one label."""
        other = self.around(nn.WithLossCell(self.network, loss_fn), _with_label(self.batch_axis, 0))
        if self.token_limit is not None:
            lengths = self.token_limit.lengths
            if isinstance(lengths, int) and lengths < 0:
                lengths -= 1  # The label comes after all other inputs.
            length_axis = _with_label(self.token_limit.length_axis, 1)
            other.token_limit = self.token_limit._replace(lengths=lengths, length_axis=length_axis)
        return other

    def around(self, network: nn.Cell, batch_axis: BatchAxis) -> "GradAccumulation":
        """Return a cell with these settings around another network."""
        settings: dict[str, Any] = {"micro_size": self.micro_size}
        if self.token_limit is not None:
            settings = self.token_limit._asdict()
        other = type(self)(
            network, batch_axis=batch_axis, weighted=self.weighted, losses=self.losses, **settings
        )
        other.owner = self.owner
        return other

    def name_of_input(self, place: int) -> str:
        """Return the name of an input: the name of the network's argument, if there is one."""
        arguments = list(self._signature.parameters.values())
        if place < len(arguments) and arguments[place].kind is not inspect.Parameter.VAR_POSITIONAL:
            return f"'{arguments[place].name}'"
        return f"input[{place}]"

    @property
    def splits(self) -> bool:
        """True if a batch may have several micro batches."""
        return self.micro_size != 1

    @property
    def argument_names(self) -> list[str]:
        """The names of the network's arguments."""
        return list(self._signature.parameters)

    def with_owner(self, text: str) -> str:
        """Return a message about a batch that begins with the class that the user called."""
        return text.replace(f"For '{_OWNER}'", f"For '{self.owner}'")

    def head(self, error: BaseException) -> None:
        """Make an error of a batch begin with the class that the user called."""
        args = []
        for each in error.args:
            args.append(self.with_owner(each) if isinstance(each, str) else each)
        error.args = tuple(args)

    def in_precision(self, owner: str, precision: Precision) -> "GradAccumulation":
        """Return this cell around a network that computes in half precision, with the same parameters."""
        if precision.level == "O0":
            return self
        return self.around(in_precision(owner, self.network, precision), self.batch_axis)

    @property
    def cls_name(self) -> str:
        """Name by which MindSpore's ``Model`` chooses a train cell; with its own cell's name, nothing would train."""
        return "MicroBatchedLoss"

    def split(self, *inputs: object) -> SplitBatch:
        """Return the micro batches of one batch, whose inputs are those of `positional`."""
        if self.token_limit is not None:
            batch = self.token_limit.split(inputs, self.batch_axis)
        else:
            assert self.micro_size is not None
            batch = split_batch(inputs, self.micro_size, self.batch_axis)
        self.bind(inputs, {})
        return batch

    def split_more(self, rows: int) -> bool:
        """Double the number of micro batches, unless batches of so many rows have single rows, or another limit."""
        if self.micro_size is None or self.needs_all_rows or rows <= self.micro_size:
            return False
        self.micro_size *= 2
        return True

    def bind(self, args: Args, kwargs: Kwargs) -> inspect.BoundArguments:
        """Bind the inputs to the arguments of `network`, or raise if they do not fit."""
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"For '{_OWNER}', the inputs do not fit the network's construct{self._signature}: "
                f"{error}. {how_to_name(self._signature, len(args), kwargs)}"
            ) from None

    def positional(self, args: Args, kwargs: Kwargs) -> Args:
        """Return the arguments of `network` as positional arguments."""
        all_axes = isinstance(self.batch_axis, tuple) and len(self.batch_axis) > len(args)
        if not kwargs and not all_axes:
            return args
        bound = self.bind(args, kwargs)
        # The entries of batch_axis stand for all arguments, given or not.
        bound.apply_defaults()
        if bound.kwargs:
            names = ", ".join(sorted(bound.kwargs))
            raise TypeError(
                f"For '{_OWNER}', the inputs must be positional arguments of the network's "
                f"construct, but got the keyword-only {names}. Remove the '*' from its signature."
            )
        return tuple(bound.args)

    def construct(self, *inputs: object) -> Tensor | Tensors:
        # MindSpore's step sets the second one, and ours takes it back.
        if self.training or self.requires_grad:
            warn_in_graph(_OTHER_STEP)
        if self.needs_all_rows or not self.training:
            return self.network(*inputs)
        loss_sum = Tensor(0.0, ms.float32)
        weight = Tensor(0.0, ms.float32)
        for part in self.split_in_graph(inputs):
            values = self.weighted_loss(*part)
            # Not '+=', which adds in place in a graph: both sums start from the same constant.
            loss_sum = loss_sum + values[0]
            weight = weight + values[1]
        return loss_sum * reciprocal(ops.stop_gradient(weight))

    def split_in_graph(self, inputs: Args) -> tuple[Args, ...]:
        """Return `(rows, *inputs)` per micro batch, as part of a graph. Inputs are tensors and Python values."""
        if self.needs_all_rows:
            _refuse_in_graph("cached")
        if self.micro_size is None:
            _refuse_in_graph("tokens")
        shapes: tuple[object, ...] = ()
        for item in inputs:
            if isinstance(item, (tuple, list, dict)):
                _refuse_in_graph("nested")
            shape = item.shape if isinstance(item, Tensor) else None
            if not F.isconstant(shape):
                _refuse_in_graph("open")
            shapes += (shape,)
        axes, bounds = _split_shapes(shapes, self.batch_axis, self.micro_size)
        parts: tuple[Args, ...] = ()
        for begin, end in bounds:
            part: Args = (Tensor(end - begin, ms.float32),)
            for item, axis in zip(inputs, axes):
                rows = item if axis is None else ops.narrow(item, axis, begin, end - begin)
                part += (rows,)
            parts += (part,)
        return parts


def _with_label(axes: BatchAxis, axis: int) -> BatchAxis:
    """Return the axes of the only input of a network, followed by that of its label."""
    if isinstance(axes, tuple) and len(axes) == 1:
        return (*axes, axis)
    return axes


def as_grad_accumulation(owner: str, network: nn.Cell) -> GradAccumulation:
    """Return the GradAccumulation in ``network``, or one that feeds a loss cell whole batches."""
    network = check_cell(owner, "network", network, "Give a GradAccumulation or a loss cell.")
    if isinstance(network, AutoParallel):
        network = network.network
    ours = adopted(network)
    if not isinstance(ours, GradAccumulation):
        ours = GradAccumulation(network, 1)
        ours.owner = owner
    # As in MindSpore's step, parameters with equal names get the names of their cells as prefixes.
    ours.network.check_names_and_refresh_name()
    return ours


def adopted(network: nn.Cell) -> nn.Cell:
    """Convert MindSpore's GradAccumulation into one of this package; return any other cell unchanged."""
    kind = type(network)
    if kind.__module__.startswith("mindspore.") and kind.__name__ in _OF_MINDSPORE:
        return GradAccumulation(network.network, network.micro_size)
    return network


def _check_inside(network: nn.Cell) -> None:
    """Raise for cells that update or split by themselves."""
    for _, cell in network.cells_and_names():
        name = type(cell).__name__
        for base in type(cell).__mro__:
            if base.__module__.startswith("mindspore.") and base.__name__ in _SPLIT_THEMSELVES:
                raise ValueError(
                    f"For '{_OWNER}', the argument 'network' must not split its batches itself, "
                    f"but got MindSpore's {name}, which returns the sum of its parts' losses. "
                    f"{_SPLIT_THEMSELVES[base.__name__]}"
                )
        if isinstance(cell, nn.TrainOneStepCell):
            raise ValueError(
                f"For '{_OWNER}', the argument 'network' must be a loss cell, but got {name}, a "
                f"training step. Give the loss cell inside it."
            )
        if isinstance(cell, OPTIMIZERS):
            raise ValueError(
                f"For '{_OWNER}', the argument 'network' must be a loss cell, but got "
                f"{type(network).__name__}, which has the optimizer {name}. Give the loss cell "
                f"inside it, and the optimizer to the step or the Model."
            )
        if isinstance(cell, GradAccumulation):
            remedy = (
                f"Put it outside: GradAccumulation({type(network).__name__}(...), "
                f"{cell.micro_size})."
            )
            if cell is network:
                remedy = "Use one, with the product of both micro_size."
            raise ValueError(
                f"For '{_OWNER}', the argument 'network' must not contain GradAccumulation, but "
                f"got one in {type(network).__name__}. {remedy}"
            )
        if isinstance(cell, WholeBatchLoss) and not isinstance(network, WholeBatchLoss):
            raise ValueError(
                f"For '{_OWNER}', the argument 'network' must be the {name} itself, but got "
                f"{type(network).__name__} around one, which would see each micro batch alone. "
                f"Move the code around it into its backbone or its loss_fn."
            )


def _check_without_tokens(lengths: object, length_axis: object) -> None:
    """Raise for settings of `micro_tokens` without it."""
    if lengths is None and length_axis == 1:
        return
    name = "length_axis" if lengths is None else "lengths"
    raise ValueError(
        f"For '{_OWNER}', the argument '{name}' must be left out without micro_tokens, but got a "
        f"value. Give micro_tokens in place of micro_size."
    )


def _check_without_size(micro_size: object, network: nn.Cell) -> None:
    """Raise for a number of micro batches, or a loss of all rows, together with `micro_tokens`."""
    if micro_size is not None:
        raise ValueError(
            f"For '{_OWNER}', the argument 'micro_size' must be left out with micro_tokens, but "
            f"got {micro_size!r}. Give one of the two: micro_tokens determines the number of micro "
            f"batches."
        )
    if isinstance(network, WholeBatchLoss):
        raise ValueError(
            f"For '{_OWNER}', the argument 'micro_tokens' must be left out for a "
            f"{type(network).__name__}, whose rows keep their order, but got a value. Give "
            f"micro_size."
        )


def check_weighted(owner: str, weighted: Weighted, remedy: str) -> Weighted:
    """Return ``weighted`` if it is a bool or ``"mean"``."""
    if not isinstance(weighted, bool):
        check_type(owner, "weighted", weighted, str, "a bool or 'mean'", remedy)
        if weighted != "mean":
            raise ValueError(
                f"For '{owner}', the argument 'weighted' must be a bool or 'mean', but got "
                f"{weighted!r}. {remedy}"
            )
    return weighted


def _check_weighted(weighted: Weighted, returned: Weighted) -> Weighted:
    """Return what the network returns, by the argument `weighted` and by what the network says of itself."""
    check_weighted(_OWNER, weighted, _WEIGHTED_REMEDY)
    if weighted and returned and weighted != returned:
        raise ValueError(
            f"For '{_OWNER}', the argument 'weighted' must be {returned!r}, as the network itself "
            f"declares, but got {weighted!r}. Leave it out."
        )
    return weighted or returned


def _check_losses(losses: Any, weighted: Weighted) -> None:
    if losses is None:
        return
    if isinstance(losses, tuple):
        names = [name for name in losses if isinstance(name, str) and name]
        if not losses or len(set(names)) < len(losses):
            raise ValueError(
                f"For '{_OWNER}', the argument 'losses' must have a different name for each scalar "
                f"after the loss, but got {losses!r}. For example losses=('cls', 'box')."
            )
        return
    check_choice(_OWNER, "losses", losses, ("sum", "first"), _LOSSES_REMEDY)
    if losses == "sum" and weighted:
        raise ValueError(
            f"For '{_OWNER}', the argument 'losses' must be None, 'first' or names with "
            f"weighted={weighted!r}, but got 'sum'. A sum needs one weight: return (sum_1 + factor "
            f"* sum_2, weight)."
        )


_split_shapes = primexpr(split_shapes)
_NOT_IN_GRAPH = {
    "nested": (
        "the inputs inside a larger graph must be tensors and Python values, but got a tuple, list "
        "or dict. Give its tensors one by one."
    ),
    "cached": (
        "a GradCacheLoss cannot be trained inside a larger graph, as in data sink mode. Call the "
        "step from Python, with dataset_sink_mode=False."
    ),
    "tokens": (
        "micro_tokens cannot be used inside a larger graph, as in data sink mode. Call the step "
        "from Python, with dataset_sink_mode=False."
    ),
    "open": (
        "the inputs inside a larger graph must have known shapes, but got an unknown length. Give "
        "set_inputs() full shapes, or call the training step from Python."
    ),
}


@primexpr
def _refuse_in_graph(what: str) -> None:
    kind = TypeError if what == "nested" else ValueError
    raise kind(f"For '{_OWNER}', {_NOT_IN_GRAPH[what]}")
