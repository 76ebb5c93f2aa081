"""Gradient accumulation for hand-written training loops."""

import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import functional as F

from ms_gradaccum._checks import (
    FrozenAfterInit,
    NonCopyable,
    check_cell,
    check_choice,
    check_type,
    refuse_nameless,
    refuse_unknown,
    typed,
)
from ms_gradaccum.backend.arithmetic import ONE, Tensors
from ms_gradaccum.backend.compiled import warn_in_graph
from ms_gradaccum.backend.optimizers import check_claims, claim_optimizers
from ms_gradaccum.backend.tensors import map_tensors, scalar
from ms_gradaccum.gradients.clipping import Clip, ClipByGlobalNorm, ClipByValue
from ms_gradaccum.gradients.mixed_precision import check_scale_of_each
from ms_gradaccum.loops.dataloader import prepare
from ms_gradaccum.loops.loop_driver import UNWEIGHTED, LoopDriver
from ms_gradaccum.loops.network_trainer import (
    TrainedNetwork,
    check_in_graph,
    chosen_of,
    only_of,
    pair_networks,
)
from ms_gradaccum.loops.schedule import AccumulationConfig, merge_config
from ms_gradaccum.parallel.reduced import UNKNOWN_LAST
from ms_gradaccum.parallel.saved_shards import gather_when_saved, whole_parameters
from ms_gradaccum.training.events import Events, Observed
from ms_gradaccum.training.micro_steps import WindowBatch
from ms_gradaccum.training.settings import LoopOptions, StepSettings, takes_options
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.window import reducers_of
from ms_gradaccum.training.window_length import AccumulationSteps

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    _Others = TypeVarTuple("_Others")

_OWNER = "Accumulator"
# The reduction of the caller's loss over its rows.
_Reduction = Literal["mean", "sum"]
# Returned by `step` and `flush`: None inside a window, a tuple for several networks.
_Outputs = StepOutput | tuple[StepOutput, ...] | None
_A = TypeVar("_A")
_B = TypeVar("_B")


class Accumulator(FrozenAfterInit, NonCopyable, Observed, nn.Cell):
    r"""Gradient accumulation for hand-written training loops, with Hugging Face Accelerate's API names.

    .. code-block:: python

        for batch in accumulator.prepare(dataset):
            with accumulator.accumulate():
                loss = accumulator.backward(*batch)      # forward, backward, add
                accumulator.clip_grad_norm(1.0)
                accumulator.step()
                accumulator.zero_grad()

    No loss needs to be divided: the update has the mean gradient over all rows (or tokens) of its window, and of all
    processes. In all batches but the last of a window, `clip_grad_norm`, `step` and `zero_grad` do nothing. The cells
    keep their training mode: with BatchNorm or Dropout, call ``network.set_train()`` before the first batch, and with
    `mixed_precision` before the Accumulator is built.

    With MindSpore's functional idiom, call the accumulator in place of the optimizer:

    .. code-block:: python

        loss, grads = grad_fn(x, y)                      # grad_fn = value_and_grad(forward, None, optimizer.parameters)
        accumulator(grads, weight=len(x), loss=loss)     # instead of optimizer(grads)

    Args:
        network (Union[Cell, list[Cell]]): Loss cell, or several that share the window. It returns a mean loss, or is a
            :class:`GradAccumulation` (which also splits each batch), or a :class:`TokenMeanLoss`.
        optimizer (Union[Cell, list[Cell]]): Optimizer of the network's weights. One network may have several, for
            different weights; several networks take a list with one entry each (which may be a list).
        accumulation_steps (Union[int, dict[int, int], BySamples, Callable]): Number of batches of one update, as for
            :class:`TrainOneStepCell`; a dict from epochs to numbers needs a prepared dataset. Default: ``1``.

    Keyword Args:
        config (AccumulationConfig, optional): Options for the end of the data and the communication of the ranks.
            Default: ``None``.
        clip (Union[ClipByGlobalNorm, ClipByGroupNorm, ClipByValue, Cell, None]): Clipping of each window's mean
            gradient, without a call of `clip_grad_norm`, as for :class:`TrainOneStepCell`. Default: ``None``.
        skip_above (Union[float, NormSpike, None]): As for :class:`TrainOneStepCell`. Default: ``None``.
        mixed_precision (Union[str, MixedPrecision, LossScaler, LossScaleManager, None]): As for
            :class:`TrainOneStepCell`. Each network has a loss scale of its own. Default: ``None``.
        parallel (Union[str, DataParallel, HSDP, Reduced]): As for :class:`Model`. Default: ``"auto"``.
        bad_micro_batch (str): As for :class:`TrainOneStepCell`. Default: ``"skip_window"``.
        compile (Union[bool, None]): As for :class:`TrainOneStepCell`. Default: ``None``.
        check_loss (bool): As for :class:`TrainOneStepCell`. Default: ``True``.

    Inputs:
        - **grads** (tuple[Tensor]) - Gradients of a batch, in the order of ``optimizer.parameters``. With
          `mixed_precision`, gradients of ``accumulator.scale(loss)``, since a small gradient of `loss` itself is 0 in
          half precision.
        - **weight** (Union[int, float, Tensor, None]) - The number of rows or tokens of the batch. Default: ``None``,
          the rows that a prepared dataset knows; without one, all batches count alike, and a warning says so.
        - **loss** (Union[Tensor, float], optional) - The batch's loss, for the report. Default: ``None``.
        - **reduction** (str) - ``"mean"`` if `grads` and `loss` are means over `weight` rows, ``"sum"`` if they are
          sums. Default: ``"mean"``.
        - **network** (Cell, optional) - With several networks, the one that the gradients belong to. Default: ``None``.

    Outputs:
        :class:`StepOutput`, as of :class:`TrainOneStepCell`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `accumulation_steps` is less than 1 or contradicts `config`, or networks and optimizers
            do not fit.
        RuntimeError: If the calls are out of order: two backward passes of a network in one batch, or a new batch while
            a full window waits for `step`; or if a later step was built with its optimizer.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import Accumulator
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> optimizer = nn.SGD(network.trainable_params(), 0.02)
        >>> accumulator = Accumulator(nn.WithLossCell(network, nn.MSELoss()), optimizer, 4)
        >>> x = ops.arange(1, 9).float().reshape(4, 2, 1)
        >>> for batch in accumulator.prepare([(part, 2 * part) for part in x]):
        ...     with accumulator.accumulate():
        ...         loss = accumulator.backward(*batch)
        ...         output = accumulator.step()
        ...         accumulator.zero_grad()
        >>> print(network.weight.value())
        [[2.04]]
    """

    @takes_options(LoopOptions)
    def __init__(
        self,
        network: nn.Cell | Sequence[nn.Cell],
        optimizer: nn.Cell | Sequence[nn.Cell | Sequence[nn.Cell]],
        accumulation_steps: AccumulationSteps = 1,
        *others: NoReturn,
        config: AccumulationConfig | None = None,
        **options: "Unpack[LoopOptions]",
    ) -> None:
        super().__init__(auto_prefix=False)
        refuse_unknown(_OWNER, Accumulator.__init__, options)
        self.config = merge_config(_OWNER, accumulation_steps, config)
        refuse_nameless(_OWNER, "accumulation_steps", others)
        pairs = pair_networks(network, optimizer)
        check_scale_of_each(_OWNER, options.get("mixed_precision"), len(pairs))
        self.events = Events(_OWNER)
        self.extras = self.events.extras
        # The windows of the networks, with their sums, optimizers and loss scales.
        windows = []
        for pair in pairs:
            # Each network has a loss scale of its own.
            settings = StepSettings.checked(_OWNER, **options)
            if settings.clip.is_own and len(pairs) > 1:
                raise ValueError(
                    f"For 'Accumulator', a clip of your own is for one network, but got "
                    f"{settings.clip!r} for {len(pairs)}. Build an Accumulator for each."
                )
            windows.append(TrainedNetwork(*pair, settings, self.config, self.events))
        self.windows = windows
        claim_optimizers(windows)
        gather_when_saved(self, reducers_of(windows))
        self.driver = LoopDriver(self.config, self.windows, self.events)
        weakref.finalize(self, self.driver.warn_if_open, "at the end of its Accumulator")
        self._build_for_graphs(self.windows[0])
        self._is_built = True

    def _build_for_graphs(self, trained: TrainedNetwork) -> None:
        """Build what a larger graph needs, in which there is one network with one optimizer."""
        self.steps = self.gradient_accumulation_steps
        # True if a batch without a weight counts as much as others of its update.
        self.counts_alike = self.config.window_length.most > 1 or trained.is_distributed
        self.add_grads: Any = None
        self.end: Any = None
        self.shapes: list[tuple[int, ...]] | None = None
        if len(self.windows) == len(trained.reducers) == 1 and self.config.window_length.is_fixed:
            self.add_grads = trained.add_grads_cell
            (self.end,) = trained.ends.of_optimizers
            self.shapes = [tuple(each.shape) for each in trained.micro_steps.parameters]

    def set_train(self, mode: bool = True) -> "Accumulator":
        """Set the mode of the networks and all cells in them, see ``nn.Cell.set_train``."""
        super().set_train(mode)
        for trained in self.windows:
            trained.network.set_train(mode)
            for cell in trained.micro_steps.compiled_cells():
                cell.set_train(mode)
        return self

    def parameters_and_names(
        self, name_prefix: str = "", expand: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Iterate over all parameters of the training, see ``nn.Cell.parameters_and_names``."""
        for each in self.windows:
            each.count.read()  # It writes the number of batches, if the host has not yet.
        # The networks come first: MindSpore may load a parameter from the first name that ends with its own.
        cells = [each.network for each in self.windows]
        for each in self.windows:
            cells += each.ends.of_optimizers
        cells.append(self.extras)
        found = nn.CellList(cells, auto_prefix=False).parameters_and_names(name_prefix, expand)
        return whole_parameters(found, reducers_of(self.windows))

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Keep the names, which are those of the networks and optimizers, when another cell gets this one."""

    def init_parameters_data(self, auto_parallel_mode: bool = False) -> dict[Parameter, Parameter]:
        """Initialize parameters, see ``nn.Cell.init_parameters_data``. MindSpore's saving begins with it."""
        seen: dict[str, Parameter] = {}
        for parameter in self.get_parameters():
            if seen.setdefault(parameter.name, parameter) is not parameter:
                raise ValueError(
                    f"For 'Accumulator', the parameters of networks and optimizers must have "
                    f"different names, but got two {parameter.name!r}. Rename one, such as "
                    f"optimizer.global_step.name = '...', or use save_state() and load_state()."
                )
        replaced: dict[Parameter, Parameter] = super().init_parameters_data(auto_parallel_mode)
        return replaced

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch ends its window, so that `step` updates. The name is Accelerate's."""
        return self.driver.is_last_batch

    @property
    def updated(self) -> bool:
        """True if the current batch made an update, False if the gradient had an Inf or a NaN."""
        return self.driver.updated

    # A prepared object has all methods of the original, so it keeps the type.
    @overload
    def prepare(self, first: _A, /) -> _A: ...
    @overload
    def prepare(
        self, first: _A, second: _B, /, *others: "Unpack[_Others]"
    ) -> "tuple[_A, _B, Unpack[_Others]]": ...
    def prepare(self, *objects: object) -> object | tuple[object, ...]:
        """Return datasets that know their last batch, and learning rate schedulers that step once per update.

        An optimizer of this loop gets the ``step()`` and ``zero_grad()`` of the Accumulator, unless it has an attribute
        of that name (``nn.AdaFactor`` has a parameter ``step``) or its class a method: then call the Accumulator's.

        Args:
            objects: Datasets (of ``mindspore.dataset``, or anything to loop over; with a length if there are several
                processes), schedulers of ``mindspore.experimental.optim.lr_scheduler``, and cells, which are
                returned as they are. Several objects are returned as a tuple.
        """
        prepared = tuple(prepare(item, self.driver) for item in objects)
        for trained in self.windows:
            for optimizer in trained.optimizers:
                if any(item is optimizer for item in objects):
                    self._give_methods(optimizer, trained)
        return _one_or_all(prepared)

    def _give_methods(self, optimizer: Any, trained: TrainedNetwork) -> None:
        """Give an optimizer the methods of this loop, except for names that it or its class has."""
        step = functools.partial(self._step_of, trained)
        zero_grad = functools.partial(self.zero_grad, network=trained.names[0])
        for name, method in (("step", step), ("zero_grad", zero_grad)):
            # It may have that of another loop.
            if isinstance(getattr(optimizer, name, method), functools.partial):
                setattr(optimizer, name, method)

    def _step_of(self, trained: TrainedNetwork) -> StepOutput | None:
        """Update a network once, at the first `step` of its optimizers."""
        if trained.is_open or len(trained.optimizers) == 1:
            return self.step(network=trained.names[0])
        trained.note_step()
        return None

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of batches of one update, by Accelerate's name; 1 with a schedule."""
        length = self.config.window_length
        return length.most if length.is_fixed else 1

    def accumulate(self, *networks: nn.Cell) -> AbstractContextManager[None]:
        """Return the context of one batch. `sync_gradients` is known from its beginning.

        Args:
            networks (Cell): Accepted as Accelerate does, and ignored: all networks share the window.
        """
        for each in networks:
            check_cell(_OWNER, "networks", each, "Write 'with accumulator.accumulate():'.")
        return self.driver.batch()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which no batch ends its window, for loops that choose the last batch themselves."""
        self.driver.withheld += 1
        try:
            yield
        finally:
            self.driver.withheld -= 1

    def scale(self, loss: Tensor, *, network: nn.Cell | None = None) -> Tensor:
        """Return ``loss`` times the loss scale. Differentiate this product if you compute gradients yourself.

        Args:
            loss (Tensor): A loss, of any shape and floating-point dtype.
            network (Cell, optional): The network, if there are several. Default: ``None``, the only one.
        """
        check_type(
            _OWNER, "loss", loss, Tensor, "a tensor", "Give the loss that is differentiated."
        )
        return loss * only_of(self.windows, network).loss_scale.value()

    def backward(
        self,
        *args: object,
        network: nn.Cell | None = None,
        weight: float | Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Run forward and backward of one batch, add its gradients, and return its mean loss, a float32 scalar.

        Outside ``accumulate()`` it counts as a batch of its own. If MindSpore's tensors have a ``backward()``, this
        method also takes a computed loss: ``backward(loss, weight=rows)``.

        Args:
            args: The batch, as the network takes it; keywords are allowed.
            network (Cell, optional): The network, of several. Default: ``None``, the only one.
            weight (Union[int, float, Tensor, None]): Weight of this batch in place of its rows, for a network that
                returns a mean over something else: its number of tokens, or 0 for a batch without any. The batch must
                not be split: micro batches have weights of their own. Default: ``None``.
        """
        trained = only_of(self.windows, network)
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim == 0 and not kwargs:
            number = self.driver.weight_of(weight, trained)
            with self.driver.batch_of(trained):
                self.driver.recognise((args, kwargs), number)
                return trained.backward_of(args[0], number)
        given = trained.checked_weight(weight)
        with self.driver.batch_of(trained):
            self.driver.recognise((args, kwargs))
            return trained.backward(WindowBatch(args, kwargs, self.driver.is_last_batch, given))

    def __call__(
        self,
        grads: Tensor | Sequence[Tensor],
        weight: float | Tensor | None = None,
        loss: Tensor | float | None = None,
        *,
        reduction: _Reduction = "mean",
        network: nn.Cell | None = None,
    ) -> StepOutput:
        check_choice(
            _OWNER,
            "reduction",
            reduction,
            ("mean", "sum"),
            "It says how the loss combines its rows.",
        )
        trained = only_of(self.windows, network)
        # Sums need no weight: each row counts alike in their sum.
        if weight is None and reduction == "sum":
            weight = 1.0
        weight = self.driver.weight_of(weight, trained)
        if trained.reducers[0].accumulates and not self.driver.in_batch:
            raise RuntimeError(
                UNKNOWN_LAST.format(
                    owner=_OWNER, got="gradients that were taken outside accumulate()"
                )
            )
        with self.driver.batch_of(trained):
            self.driver.recognise((), weight)
            factor = weight if reduction == "mean" else 1.0
            trained.add_grads(grads, weight, loss, factor)
        if self.sync_gradients:
            return self.driver.step(trained)
        return trained.partial_output()

    def construct(
        self,
        grads: Tensor | Sequence[Tensor],
        weight: float | Tensor | None = None,
        loss: Tensor | float | None = None,
        reduction: _Reduction = "mean",
    ) -> tuple[Tensor | None, ...]:
        """Do the same inside a compiled function, and return the items of a StepOutput in a tuple.

        The graph counts its batches itself, and does not see the end of the data: call `flush` at that point.
        """
        if isinstance(grads, Tensor):
            grads = (grads,)
        shapes = map_tensors(ops.shape, grads)
        if self.shapes is None or F.isconstant(shapes):
            check_in_graph(shapes, self.shapes)
        if weight is None:
            if reduction == "mean" and self.counts_alike:
                warn_in_graph(UNWEIGHTED)
            weight = ONE
        weight = scalar(weight)
        factor = weight if reduction == "mean" else ONE
        value = Tensor(math.nan, ms.float32) if loss is None else scalar(loss)
        added = self.add_grads(factor, value * factor, weight, *grads)
        output: Tensors = self.end.after_batch(added, self.steps)
        return (None, *output[1:]) if loss is None else output

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip as :meth:`clip_grad_norm` does, with Accelerate's arguments; `parameters` are all trained ones."""
        self._check_all(parameters)
        if norm_type != 2.0:
            raise ValueError(
                f"For 'Accumulator', the argument 'norm_type' must be 2, but got "
                f"{typed(norm_type)}. Leave it out."
            )
        return self.clip_grad_norm(max_norm)

    def clip_grad_value_(
        self, parameters: Tensor | Iterable[Tensor], clip_value: float
    ) -> Tensor | None:
        """Clip as :meth:`clip_grad_value` does, with Accelerate's arguments; `parameters` are all trained ones."""
        self._check_all(parameters)
        return self.clip_grad_value(clip_value)

    def _check_all(self, parameters: Tensor | Iterable[Tensor]) -> None:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        given = set(map(id, parameters))
        for trained in self.windows:
            for optimizer in trained.optimizers:
                for each in optimizer.parameters:
                    if id(each) not in given:
                        raise ValueError(
                            f"For 'Accumulator', the argument 'parameters' must contain all "
                            f"trained parameters, but got none of {each.name!r}. The norm is that "
                            f"of the whole gradient; for groups see ClipByGroupNorm."
                        )

    def clip_grad_norm(
        self, max_norm: float, *more: NoReturn, network: nn.Cell | None = None
    ) -> Tensor | None:
        """Clip the window's mean gradient to a global norm in the coming `step`.

        Args:
            max_norm (float): The largest norm that is let through, see :class:`ClipByGlobalNorm`.
            network (Cell, optional): The network, of several. Default: ``None``, each for itself.

        Returns:
            The norm before clipping, a float32 scalar (of the first network, if there are several); None inside
            a window.
        """
        _refuse_more("max_norm", more, "clip_grad_norm")
        return self._clip(ClipByGlobalNorm(max_norm), network)

    def clip_grad_value(
        self, limit: float, *more: NoReturn, network: nn.Cell | None = None
    ) -> Tensor | None:
        """Clip each element of the window's mean gradient in the coming `step`, see :class:`ClipByValue`."""
        _refuse_more("limit", more, "clip_grad_value")
        return self._clip(ClipByValue(limit), network)

    def _clip(self, clip: Clip, network: nn.Cell | None) -> Tensor | None:
        chosen = chosen_of(self.windows, network)
        full = [trained for trained in chosen if self.sync_gradients and trained.is_open]
        for trained in full:
            if trained.full is not None and type(trained.full.clip) not in (type(None), type(clip)):
                raise RuntimeError(
                    "For 'Accumulator', an update must be clipped by norm or by value, but got "
                    "both. Call only one of clip_grad_norm() and clip_grad_value()."
                )
        for trained in chosen:
            trained.last_clip = clip
        norms = [trained.reduce(clip).outputs[0].grad_norm for trained in full]
        return norms[0] if norms else None

    @overload
    def step(self) -> _Outputs: ...
    @overload
    def step(self, *, network: nn.Cell) -> StepOutput | None: ...
    def step(self, *, network: nn.Cell | None = None) -> _Outputs:
        """Update at the end of a window, with the mean gradient of all its rows; do nothing inside it.

        Args:
            network (Cell, optional): The network, of several. Default: ``None``, all of them.

        Returns:
            :class:`StepOutput` of the window, a tuple of them for several networks; None inside a window.
        """
        chosen = chosen_of(self.windows, network)
        check_claims(chosen)
        chosen[0].note_step()
        if not self.sync_gradients:
            return None
        return _one_or_all(tuple(self.driver.step(trained) for trained in chosen))

    def zero_grad(self, *, network: nn.Cell | None = None) -> None:
        """Discard a full window that has not been stepped. After `step` and before `backward`, it does nothing."""
        for trained in chosen_of(self.windows, network):
            if (
                self.sync_gradients
                and trained.is_open
                and (trained.has_batch or not self.driver.in_batch)
            ):
                trained.throw_away()

    def flush(self) -> _Outputs:
        """Update with an unfinished window, divided by its true weight, and return as `step`; None if it is empty.

        It clips as the loop's last `clip_grad_norm` or `clip_grad_value` says. All processes must call it.
        """
        check_claims(self.windows)
        if not self.driver.begin_flush():
            return None
        return _one_or_all(self.driver.flush())

    def drop(self) -> int:
        """Discard an unfinished window and return the number of its batches."""
        return self.driver.drop()

    def join(self) -> None:
        """Join the collectives of a batch with no local data, once this process has run out of data.

        A prepared dataset calls it at its end.
        """
        self.driver.join()


def _refuse_more(name: str, more: Sequence[object], method: str) -> None:
    """Raise if a method that takes one argument gets Accelerate's two."""
    if more:
        raise TypeError(
            f"For 'Accumulator', the argument '{name}' must be given alone, but got "
            f"{1 + len(more)} arguments. Call {method}(1.0), or {method}_(parameters, 1.0)."
        )


def _one_or_all(items: tuple[_A, ...]) -> _A | tuple[_A, ...]:
    return items[0] if len(items) == 1 else items
