"""The training step: the micro batches of one batch, and an update at the end of the window."""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import mindspore as ms
from mindspore import JitConfig, Parameter, Tensor, nn, ops

from ms_gradaccum._checks import (
    FrozenAfterInit,
    NonCopyable,
    check_construct,
    counted,
    refuse_nameless,
    refuse_unknown,
    warn,
)
from ms_gradaccum.backend.arithmetic import Tensors
from ms_gradaccum.backend.compiled import number_of, numbered
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.optimizers import check_claims, check_optimizer, claim_optimizers
from ms_gradaccum.batch.arguments import Args, Kwargs
from ms_gradaccum.parallel.factory import build_reducers, check_parallel
from ms_gradaccum.parallel.kinds import Kind
from ms_gradaccum.parallel.saved_shards import gather_when_saved, whole_parameters
from ms_gradaccum.parallel.semi_auto import SemiAuto, refuse_partition
from ms_gradaccum.static_graph.partitioned_step import PartitionedStep
from ms_gradaccum.training.events import Events, Observed
from ms_gradaccum.training.grad_accumulation import as_grad_accumulation
from ms_gradaccum.training.micro_step import share_and_factor
from ms_gradaccum.training.micro_steps import WindowBatch
from ms_gradaccum.training.settings import (
    STEP_REMEDY,
    StepOptions,
    StepSettings,
    check_stock_arguments,
    takes_options,
)
from ms_gradaccum.training.step import Step
from ms_gradaccum.training.step_output import StepOutput
from ms_gradaccum.training.window import Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWNER = "TrainOneStepCell"


class WindowDriver:
    """The driver of the windows of a training, one for each network, between two batches."""

    in_batch = False  # True if the program is inside a batch.
    is_carried = False  # True if a Model leaves windows open at the end of its data.
    has_warned_of_open = False
    owner: str  # The class that the user called.

    def __init__(self, windows: Sequence[Window], events: Events) -> None:
        self.windows = windows
        self.events = events

    @property
    def is_open(self) -> bool:
        """True if the buffer of some network is not empty."""
        return any(window.is_open for window in self.windows)

    def open_batches(self) -> int:
        """Return the number of batches in the buffers, with those of graphs. It is read from the device."""
        return max(window.count.read() for window in self.windows)

    def begin_flush(self) -> bool:
        """Return whether any rank has an open window. Collective."""
        most = self.windows[0].reducers[0].most("flushes its window", self.open_batches())
        for window in self.windows:
            if window.ranks.is_on:
                window.ranks.compare()
        return most > 0

    def drop(self) -> int:
        """Discard an unfinished window and return the number of its batches."""
        batches = self.open_batches()
        for window in self.windows:
            window.discard()
        return batches

    def warn_if_open(self, when: str) -> None:
        """Warn, once, if there is an unfinished window."""
        is_meant = self.in_batch or self.is_carried
        if self.is_open and not (is_meant or self.has_warned_of_open):
            self.has_warned_of_open = True
            batches = self.open_batches()
            warn(
                f"For '{self.owner}', a window of {counted(batches, 'batch')} was still open "
                f"{when}, and no update was made with it. Call flush() after the loop, or drop() "
                f"to discard it."
            )


class HostDrivenStep(WindowDriver, Step):
    """One call per batch, one update per window of batches. Inside a larger graph it is part of that graph."""

    def __init__(
        self, network: nn.Cell, optimizer: nn.Cell, kind: Kind | None, settings: StepSettings
    ) -> None:
        Step.__init__(self, network, settings)
        self.accumulation_steps = settings.window_length.most
        self.has_schedule = not settings.window_length.is_fixed
        # Set by a Model while it trains: the number of the pass in which an open window of so many batches has begun.
        self.epoch_of: Callable[[int], int] | None = None
        # A schedule is asked once for a window, and not again for its further batches.
        self.length_at = functools.lru_cache(1)(settings.window_length.at)
        agreed = {**settings.agreed(), "micro_size": network.micro_size}
        if network.token_limit is not None:
            agreed["micro_tokens"] = network.token_limit.micro_tokens
        reducers = build_reducers(_OWNER, kind, network, [optimizer], agreed, **settings.of_sums())
        self.window = Window(network, [optimizer], reducers, settings, self.events)
        WindowDriver.__init__(self, [self.window], self.events)
        # The parts for use inside a larger graph.
        (self.reducer,) = self.window.reducers
        (self.end,) = self.window.ends.of_optimizers
        self.micro_step = self.window.micro_steps.cell
        self.number = number_of(self)

    def steps_of_window(self) -> int:
        if not self.has_schedule:
            return self.accumulation_steps
        begun = self.window.count.get()
        epoch = None
        if self.epoch_of is not None:
            epoch = self.epoch_of(begun)
        return self.length_at(epoch, self.events.updates, self.events.batches - begun)

    def run(self, args: Args, kwargs: Kwargs, as_graph: Callable[..., Tensors]) -> StepOutput:
        return self._batch(WindowBatch(args, kwargs))

    def join(self) -> StepOutput:
        return self._batch(None)

    def _batch(self, batch: WindowBatch | None) -> StepOutput:
        """Count one batch, add it to the window, and end it. None is a batch that only other ranks have."""
        steps = self.steps_of_window()
        self.in_batch = True
        batches = 1
        if steps > 1:
            batches += self.window.count.get()
        # A loaded checkpoint may have more batches.
        is_last = batches >= steps
        self.events.batches += 1
        try:
            if batch is None:
                self.window.micro_steps.join()
            else:
                self.window.add(batch._replace(is_last=is_last))
        except BaseException as error:
            if self.window.can_continue_after(error):
                self._end_batch(batches, is_last)  # The other ranks end theirs, too.
            else:
                # Another thread may be in the batch, whose number is this one's, too.
                self.events.batches -= 1
            raise
        else:
            return self._end_batch(batches, is_last)
        finally:
            self.in_batch = False

    def _end_batch(self, batches: int, is_last: bool) -> StepOutput:
        if is_last:
            return self._close()
        self.window.count.set(batches)
        return self.window.partial_output()

    def _close(self) -> StepOutput:
        """End the window, and tell the listeners before and after."""
        try:
            self.events.tell("on_update_begin")
        except BaseException as error:
            # Otherwise its rows would be in the next window, too.
            self.window.discard(for_all=True)
            if self.window.can_continue_after(error):
                self.events.update_end(self.window.close())
            raise
        output = self.window.close()
        self.in_batch = False
        self.events.update_end(output)
        return output

    def check_between_batches(self, caller: str) -> None:
        """Raise if the ``caller`` would find a part of a batch in the sums, or a batch that is not counted yet."""
        if self.in_batch:
            raise RuntimeError(
                f"For '{self.owner}', {caller}() must come between two batches, but got it inside "
                f"one. Call it after the step, or in a callback's on_update_end()."
            )

    def flush(self) -> StepOutput | None:
        self.check_between_batches("flush")
        if not self.begin_flush():
            return None
        output = self._close()
        if not (output.has_overflow or float(output.weight.asnumpy()) > 0):
            return None
        return output

    def drop(self) -> int:
        return super().drop() if self.open_batches() else 0

    def measure_loss(self, batch: Args) -> None:
        if self.window.ranks.is_on:
            self.window.ranks.note_first("batch", batch)
            self.window.ranks.compare()
        if self.window.advisor.is_unmeasured:
            inputs = self.network.positional(batch, {})
            self.window.advisor.before_sink(inputs, self.network.split(*inputs))

    def look_in_graph(self) -> None:
        """Warn, as before a first batch, while a larger graph with this step is compiled."""
        self.check_in_graph()
        self.window.micro_steps.check_hooks(False)
        self.window.advisor.before_graph()

    def construct(self, *inputs: object) -> Tensors:
        """The whole window as part of one graph. Return the items of a StepOutput."""
        refuse_partition()
        _look_in_graph(self.number)
        parts = self.network.split_in_graph(inputs)
        batch_rows = Tensor(0.0, ms.float32)
        for part in parts:
            batch_rows = batch_rows + part[0]
        done = Tensor(0.0, ms.float32)
        for part in parts:
            share, factor = share_and_factor(self.micro_step.backward_start, part[0], batch_rows)
            done = ops.depend(self.micro_step(share, factor, *part[1:])[2], done)
        if self.accumulation_steps == 1:
            output: Tensors = self.end(done)
        else:
            output = self.end.after_batch(done, self.accumulation_steps)
        return output


@primexpr
def _look_in_graph(number: int) -> None:
    step = numbered(number)
    if step is not None:
        step.look_in_graph()


class TrainOneStepCell(FrozenAfterInit, NonCopyable, nn.TrainOneStepCell, Observed):
    r"""Train with gradient accumulation: one call per batch, one optimizer update per window of batches.

    .. code-block:: python

        for micro_batch in split(batch, micro_size):
            sums, weight = sums + grad(loss_sum(micro_batch)), weight + weight_of(micro_batch)
        if last_batch_of_the_window:
            optimizer(clip(sums / weight))

    In a call from Python, each micro batch has its own forward and backward pass. Only one micro batch's activations
    live at a time, and compile time does not depend on `micro_size`. Inside a larger graph (data sink mode), the whole
    window is part of that graph.

    It never calls ``set_train()``, as MindSpore's own step does not: where there is BatchNorm or Dropout, call it
    before the first batch. :class:`Model` does so by itself.

    Args:
        network (Cell): A :class:`GradAccumulation`, alone or in ``AutoParallel``, or a loss cell for whole batches.
        optimizer (Cell): Optimizer of ``mindspore.nn``, ``mindspore.mint.optim`` or
            ``mindspore.experimental.optim`` over parameters of `network`.
        sens (Union[float, None]): MindSpore's argument: ``None`` or 1 (see `mixed_precision`). Default: ``None``.
        return_grad (bool): MindSpore's argument: only ``False``. Default: ``False``.

    Keyword Args:
        accumulation_steps (Union[int, dict[int, int], BySamples, Callable]): Number of batches (calls) of one update.
            A function gets the number of updates so far and returns the batches of the next one; a :class:`BySamples`
            follows the samples so far; a dict from epochs to numbers needs a :class:`Model`. Default: ``1``.
        clip (Union[ClipByGlobalNorm, ClipByGroupNorm, ClipByValue, Cell, None]): Clipping of the window's mean
            gradient. A cell of your own has ``construct(grads, norm)``, which returns the gradients of the update: it
            gets all mean gradients in the order of ``optimizer.parameters``, in float32, and their norm. Its parameters
            are saved with the step. Default: ``None``.
        skip_above (Union[float, NormSpike, None]): A window makes no update if the norm of its mean gradient, before
            clipping, is above this number, or a :class:`NormSpike`. Optimizer, schedules, loss scale and averages stay
            as they are, as after an overflow, and `updated` is False. Default: ``None``.
        mixed_precision (Union[str, MixedPrecision, LossScaler, LossScaleManager, None]): The part that computes in half
            precision: a name that :class:`MixedPrecision` lists, ``"O1"``, ``"O2"``, ``"O3"`` or ``"auto"``, or its
            settings; or only the loss scaling, by an object of ``mindspore.amp``. Default: ``None``.
        parallel (Union[str, DataParallel, HSDP, Reduced]): As for :class:`Model`. Default: ``"auto"``.
        bad_micro_batch (str): Treatment of an Inf or a NaN in a gradient. ``"skip_window"``: its window makes no
            update. ``"drop"``: its micro batch is left out with its weight, on any rank, and so is one whose loss
            alone is not finite. This costs a pass over the gradients of each micro batch. Default:
            ``"skip_window"``.
        compile (Union[bool, None]): ``None``: network, loss and optimizer run as a compiled graph in GRAPH mode, op by
            op in PYNATIVE mode. ``True``: as a graph there too, often several times as fast, but Python control flow
            then runs only once; :func:`verify` shows whether it trains the same. Default: ``None``.
        check_loss (bool): Whether to test, with forward passes of some rows of the first batches, if the loss can be
            trained in micro batches, and warn if not. The training itself does not change. Default: ``True``.

    Inputs:
        - **\*inputs** - One batch, as `network` takes it. Keywords are allowed.

    Outputs:
        :class:`StepOutput`.

    Raises:
        TypeError: If an argument has the wrong type, or a subclass has its own `construct`.
        ValueError: If `accumulation_steps` is less than 1, the optimizer has parameters that `network` lacks, the
            device lacks what `mixed_precision` asks for, or `sens` or `return_grad` has another value; at a call, if
            `compile` is ``True`` and the network has hooks.
        RuntimeError: If it is called after another step was built with its optimizer.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, TrainOneStepCell
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=4)
        >>> optimizer = nn.SGD(network.trainable_params(), 0.02)
        >>> train_step = TrainOneStepCell(loss_cell, optimizer, clip=ClipByGlobalNorm(1000.0))
        >>> x = ops.arange(1, 9).float().reshape(8, 1)
        >>> output = train_step(x, 2 * x)
        >>> print(output.loss, network.weight.value())
        102.0 [[2.04]]
    """

    # True if `parameters_and_names` yields the whole parameters, as for a checkpoint.
    _shows_whole = False

    @takes_options(StepOptions)
    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        sens: float | None = None,
        return_grad: bool = False,
        *others: NoReturn,
        **options: "Unpack[StepOptions]",
    ) -> None:
        refuse_unknown(_OWNER, TrainOneStepCell.__init__, options)
        check_construct(_OWNER, type(self), TrainOneStepCell, STEP_REMEDY)
        check_stock_arguments(_OWNER, sens, return_grad)
        refuse_nameless(_OWNER, "return_grad", others)
        settings = StepSettings.checked(_OWNER, **options)
        kind = check_parallel(_OWNER, settings.parallel, network)
        network = as_grad_accumulation(_OWNER, network)
        check_optimizer(_OWNER, optimizer, network)
        super().__init__(network.in_precision(_OWNER, settings.precision), optimizer)
        self.network.set_grad(False)  # Its `construct` only evaluates.
        if isinstance(kind, SemiAuto):
            self.body: Step = PartitionedStep(self.network, optimizer, kind, settings)
            # The owner of the optimizers, the reducers and the loss scale. An Accumulator has one for each network.
            self.windows: list[Window | Step] = [self.body]
            # Compile this cell, and no cell inside, for training, so that the compiler recognises accumulation.
            self.add_flags(training=True)
        else:
            host = HostDrivenStep(self.network, optimizer, kind, settings)
            self.body = host
            self.windows = [*host.windows]
            # When the step is deleted or the program ends.
            weakref.finalize(self, host.warn_if_open, "at the end of its step")
        self.events = self.body.events
        self.extras = self.events.extras
        gather_when_saved(self, self.windows[0].reducers)
        claim_optimizers(self.windows)
        self._shows_whole = self._is_built = True

    @property
    def accumulation_steps(self) -> int:
        """Number of batches of the open window's update, or of the next one."""
        return self.body.steps_of_window()

    @property
    def scale_sense(self) -> Tensor:
        """The loss scale of the open window, with the name from MindSpore's step with a loss scale."""
        scale: Tensor = self.body.loss_scale.value()
        return scale

    @property
    def loss_scaling_manager(self) -> nn.Cell:
        """The loss scale, with the name of MindSpore's step. Callbacks of model zoos call its ``get_loss_scale()``."""
        return self.body.loss_scale

    def set_train(self, mode: bool = True) -> "TrainOneStepCell":
        """Set the mode of this cell and all cells in it, see ``nn.Cell.set_train``. No other method does so."""
        super().set_train(mode)
        # A compiled cell has a phase of its own.
        for cell in self.windows[0].compiled_cells():
            cell.set_train(mode)
        return self

    def set_jit_config(self, jit_config: JitConfig) -> None:
        """Set how the cells inside are compiled, see ``nn.Cell.set_jit_config``."""
        super().set_jit_config(jit_config)
        for cell in self.windows[0].compiled_cells():
            cell.set_jit_config(jit_config)

    def parameters_and_names(
        self, name_prefix: str = "", expand: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Iterate over the parameters, see ``nn.Cell.parameters_and_names``: whole parameters in place of shards."""
        found: Iterator[tuple[str, Parameter]] = super().parameters_and_names(name_prefix, expand)
        if not self._shows_whole:
            return found
        return whole_parameters(found, self.windows[0].reducers)

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Rename the parameters, see ``nn.Cell.update_parameters_name``."""
        super().update_parameters_name(prefix, recurse)
        gather_when_saved(self, self.windows[0].reducers)

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the whole window as one graph, see ``nn.Cell.compile``."""
        self.check_claims()
        shown = self._shows_whole
        self._shows_whole = False
        try:
            with self.body.compiling():
                super().compile(*args, **kwargs)
        except Exception as error:
            self.network.head(error)
            raise
        finally:
            self._shows_whole = shown

    def check_claims(self) -> None:
        """Raise if the optimizer belongs to a step that was built later."""
        check_claims(self.windows)

    def __call__(self, *args: object, **kwargs: object) -> StepOutput:
        if not self.windows[0].has_claims:
            self.check_claims()
        for extra in self.extras:
            # Those of an earlier training, too, which do not listen any more.
            extra.check_can_save(_OWNER)
        if self.use_graceful_exit:
            self._agree_to_exit()
        return self.body.run(args, kwargs, super().__call__)

    def join(self) -> StepOutput:
        """Join the collectives of a batch with no local data. It counts as a batch of the window.

        All other processes must call the step, or join, at the same time.
        """
        self.check_claims()
        if self.use_graceful_exit:
            self._agree_to_exit()
        return self.body.join()

    def _agree_to_exit(self) -> None:
        """Let MindSpore's ``OnRequestExit`` end the training once all ranks have the request."""
        # Before the batch, which may fail only on this rank.
        if self.windows[0].is_distributed:
            is_missing = 1 - int(self.init_param.asnumpy().item())
            most = self.windows[0].reducers[0].most("begins a batch", is_missing)
            self.exit_param.set_data(Tensor(most == 0))

    def open_batches(self) -> int:
        """Return the number of batches in the unfinished window; 0 right after an update."""
        return self.body.open_batches()

    def flush(self) -> StepOutput | None:
        """Apply an unfinished window, divided by its true weight. Return None if there is none.

        All processes must call it, even with an empty window.
        """
        self.check_claims()
        return self.body.flush()

    def drop(self) -> int:
        """Discard an unfinished window and return its number of batches."""
        return self.body.drop()

    def construct(self, *inputs: object) -> Tensors:
        """The whole window as part of one graph. Return the items of a StepOutput."""
        items = self.body(*inputs)
        if self.use_graceful_exit:
            items = self.graceful_exit.exit_by_request(items, self.init_param, self.exit_param)
        return self.shown(items)

    def shown(self, items: Tensors) -> Tensors:
        """Return the items of a StepOutput that a larger graph returns. Other projects' monitors get others."""
        return items
