"""The training step: the micro batches of one batch, and an update at the end of the window."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum._checks import check_accumulation_steps, warn_of_dropped
from ms_gradaccum.bad_micro_batch import BadMicroBatch, check_bad_micro_batch
from ms_gradaccum.compiled import check_compile, graph_mode
from ms_gradaccum.events import Events, Observed
from ms_gradaccum.grad_accumulation import as_grad_accumulation
from ms_gradaccum.grad_clip import Clip, check_clip
from ms_gradaccum.micro_steps import MicroSteps
from ms_gradaccum.optimizers import check_optimizer, claim_optimizer
from ms_gradaccum.parallel.choose import ParallelChoice, build_parallel, check_parallel
from ms_gradaccum.parallel.partitioned import PartitionedWindow
from ms_gradaccum.parallel.semi_auto import SemiAuto, check_compiling
from ms_gradaccum.parallel.world import gather_counts
from ms_gradaccum.precision import Precision, PrecisionChoice, check_precision
from ms_gradaccum.step_output import StepOutput
from ms_gradaccum.stock_cell import STEP_REMEDY, check_construct, check_stock_arguments
from ms_gradaccum.window import Window

_OWNER = "TrainOneStepCell"
# Device matrix, tensor map, slice shape, field size, uniform split, shard group, shapes before and after a reshape.
_ANY_LAYOUT = [[], [-1], [], 0, True, "", [], []]


class TrainOneStepCell(nn.TrainOneStepCell, Observed):
    r"""Train with gradient accumulation: one call per batch, one optimizer update per window of batches.

    .. code-block:: python

        for micro_batch in split(batch, micro_size):
            sums, weight = sums + grad(loss_sum(micro_batch)), weight + weight_of(micro_batch)
        if last_batch_of_the_window:
            optimizer(clip(sums / weight))

    Called from Python, each micro batch is a forward and a backward pass of its own, so that the activations of one
    micro batch live at a time and compiling takes as long for any `micro_size`. In GRAPH mode it is one run of a
    compiled graph; in PYNATIVE mode the network and the optimizer run op by op, as in MindSpore's own step. Inside a
    larger graph (data sink mode), the whole window is part of that graph.

    It leaves the cells in the training mode that they have, as MindSpore's own step does: where there is BatchNorm or
    Dropout, call ``train_step.set_train()`` before the first batch. :class:`Model` does so by itself.

    Args:
        network (Cell): A :class:`GradAccumulation`, alone or inside ``AutoParallel``, or any loss cell, which is then
            fed whole batches.
        optimizer (Cell): Optimizer of ``mindspore.nn``, ``mindspore.mint.optim`` or
            ``mindspore.experimental.optim`` over parameters of `network`.
        sens (Union[float, None]): Of MindSpore's cell: ``None`` or 1, else see `mixed_precision`. Default: ``None``.
        return_grad (bool): Of MindSpore's cell: ``False``. Default: ``False``.

    Keyword Args:
        accumulation_steps (int): Number of batches (calls) of one update. Default: ``1``.
        clip (Union[ClipByGlobalNorm, ClipByGroupNorm, ClipByValue, None]): Clipping of the window's mean gradient.
            Default: ``None``.
        mixed_precision (Union[str, MixedPrecision, LossScaler, LossScaleManager, None]): What computes in half
            precision: a name that :class:`MixedPrecision` lists, ``"O1"``, ``"O2"``, ``"O3"`` or ``"auto"``, or its
            settings; or only how the loss is scaled, by an object of ``mindspore.amp``. Default: ``None``.
        parallel (Union[str, DataParallel, HSDP]): As for :class:`Model`. Default: ``"auto"``.
        bad_micro_batch (str): What becomes of a window with an Inf or a NaN in a gradient or loss.

            - ``"skip_window"``: it makes no update.
            - ``"drop"``: the micro batches that have them are left out, on whichever rank, with their weight. It costs
              a pass over the gradients of each micro batch.

            Default: ``"skip_window"``.

        compile (Union[bool, None]): What runs the network, its loss and the optimizer. ``None``: what MindSpore's mode
            says, a compiled graph in GRAPH mode, op by op in PYNATIVE mode. ``True``: a compiled graph in PYNATIVE mode
            too, which is often several times as fast and decides once what Python decides in `construct`;
            :func:`verify` tells whether that trains the same. Default: ``None``.

    Inputs:
        - **\*inputs** - One batch, as `network` takes it. Keywords are allowed.

    Outputs:
        :class:`StepOutput`.

    Raises:
        TypeError: If an argument has the wrong type, or a subclass has its own `construct`.
        ValueError: If `accumulation_steps` is less than 1, the optimizer has parameters that `network` lacks, or
            belongs to another training cell, the device lacks what `mixed_precision` asks for, or `sens` or
            `return_grad` ask for something; later, if `compile` is ``True`` and the network has hooks, or PYNATIVE mode
            without it has a loss of several `terms`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

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

    # Whether `parameters_and_names` stands for what a checkpoint holds.
    _shows_whole = False

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        sens: float | None = None,
        return_grad: bool = False,
        *,
        accumulation_steps: int = 1,
        clip: Clip = None,
        mixed_precision: PrecisionChoice = None,
        parallel: ParallelChoice = "auto",
        bad_micro_batch: BadMicroBatch = "skip_window",
        compile: bool | None = None,
    ) -> None:
        check_construct(_OWNER, type(self), TrainOneStepCell, STEP_REMEDY)
        check_stock_arguments(_OWNER, sens, return_grad)
        compiles = check_compile(_OWNER, compile)
        kind = check_parallel(_OWNER, parallel, network)
        network = as_grad_accumulation(_OWNER, network)
        check_optimizer(_OWNER, optimizer, network)
        drops = check_bad_micro_batch(_OWNER, bad_micro_batch)
        precision = check_precision(_OWNER, mixed_precision)
        check_accumulation_steps(_OWNER, accumulation_steps)
        clip = check_clip(_OWNER, clip)
        network = network.in_precision(_OWNER, precision)
        super().__init__(network, optimizer)
        self.accumulation_steps = accumulation_steps
        self.compiles = compiles
        self.events = Events(_OWNER)
        # On Ascend and GPU, the settings of AutoParallel, with which the compiler partitions the whole step.
        self.semi_auto = kind if isinstance(kind, SemiAuto) else None
        if self.semi_auto is not None:
            self.semi_auto.check(accumulation_steps, network, drops, clip, precision.reduce_dtype)
            self.partitioned = PartitionedWindow(network, optimizer, clip, precision.loss_scale)
            # The compiler knows accumulation in training alone. The user's cells keep the modes that they have.
            self.add_flags(training=True)
        else:
            self._build_host_driven(kind, clip, precision, drops)
        claim_optimizer(optimizer, self)

    def _build_host_driven(self, kind: Any, clip: Any, precision: Precision, drops: bool) -> None:
        network, optimizer = self.network, self.optimizer
        settings = {"micro_size": network.micro_size, "accumulation_steps": self.accumulation_steps, "clip": repr(clip)}
        settings |= {"mixed_precision": precision.text, "bad_micro_batch": drops}
        self.parallel = build_parallel(_OWNER, kind, optimizer, network, settings, drops, precision.reduce_dtype)
        self.buffer = self.parallel.buffer
        network.adds_batches = self.accumulation_steps > 1 or self.parallel.several
        self.micro_steps = MicroSteps(_OWNER, network, [self.parallel], [self.weights], precision, drops, self.compiles)
        self.micro_steps.events = self.events
        self.micro_step = self.micro_steps.cell
        self.loss_scale = precision.loss_scale
        self.window = Window(_OWNER, optimizer, clip, self.parallel, self.loss_scale, self.compiles)
        # MindSpore's saving asks these for the whole of a parameter; in place of a layout, ours knows how to gather.
        self.parameter_layout_dict = dict.fromkeys(self.parallel.gathers, _ANY_LAYOUT)
        self.parallel_parameter_merge_net_dict = self.parallel.gathers
        self._shows_whole = True

    @property
    def scale_sense(self) -> Tensor:
        """The loss scale of the open window, by the name that MindSpore's step with a loss scale has for it."""
        return (self if self.semi_auto is None else self.partitioned).loss_scale.value()

    def set_train(self, mode: bool = True) -> "TrainOneStepCell":
        """Set the mode of this cell and all cells in it, see ``nn.Cell.set_train``. Nothing else does so."""
        super().set_train(mode)
        # A compiled cell is looked up by its own phase, which tells its training graph from the other one.
        for cell in self._compiled_cells():
            cell.set_train(mode)
        return self

    def set_jit_config(self, jit_config: Any) -> None:
        """Set how the cells inside are compiled, see ``nn.Cell.set_jit_config``."""
        super().set_jit_config(jit_config)
        for cell in self._compiled_cells():
            cell.set_jit_config(jit_config)

    def _compiled_cells(self) -> list[Any]:
        if self.semi_auto is not None:
            return []
        return [*self.micro_steps.compiled_cells(), *self.window.compiled_cells()]

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Any]]:
        """Iterate over the parameters, see ``nn.Cell.parameters_and_names``; over the whole ones, where this process
        has a part, so that what saves and loads checkpoints need not know."""
        for name, parameter in super().parameters_and_names(name_prefix, expand):
            saved = self.parallel.saved(parameter) if self._shows_whole else parameter
            if saved is not None:
                yield name, saved

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the whole window as one graph, see ``nn.Cell.compile``."""
        settings = nullcontext() if self.semi_auto is None else self.semi_auto.compiling()
        shown, self._shows_whole = self._shows_whole, False
        try:
            with settings:
                super().compile(*args, **kwargs)
        finally:
            self._shows_whole = shown

    def __call__(self, *args: Any, **kwargs: Any) -> StepOutput:
        self.events.batches += 1
        if self.semi_auto is not None:
            return self._run_partitioned(args, kwargs)
        batches = self.open_batches()
        # Whether the last micro batch of the window adds up the sums over the ranks.
        reduces = self.parallel.overlaps and batches + 1 == self.accumulation_steps
        try:
            self.micro_steps.run(args, kwargs, reduces)
        except BaseException:
            self.events.batches -= 1
            if self.micro_steps.has_added:
                self._abandon()
            raise
        return self._end_batch(batches, reduces)

    def _run_partitioned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepOutput:
        self.events.update_begin()
        with graph_mode():
            output = StepOutput(*super().__call__(*self.network.positional(args, kwargs)))
        if self.events.heard:  # Else nothing waits for the device.
            self.events.update_end(output)
        return output

    def _end_batch(self, batches: int, reduced: bool = False) -> StepOutput:
        """Count a batch after so many, and end the window if it is the last one."""
        if batches + 1 == self.accumulation_steps:
            return self._close(reduced)
        self.buffer.batches.set_data(Tensor(batches + 1, ms.int32))
        return self.window.so_far()

    def _close(self, reduced: bool = False) -> StepOutput:
        try:
            self.events.update_begin()
        except BaseException:
            # As after a failure in the update itself: its rows would be in the next window too.
            self.buffer.clear()
            raise
        output = self.window.close(reduced)
        self.events.update_end(output)
        return output

    def join(self) -> StepOutput:
        """Take part in a batch of the other processes without one: this process has run out of data.

        Adds nothing, and counts as a batch of the window. Of several processes all but those that join must call the
        step at the same time.
        """
        self.events.batches += 1
        self.micro_steps.join()
        return self._end_batch(self.open_batches())

    def open_batches(self) -> int:
        """Return the number of batches in the unfinished window; 0 right after an update."""
        return 0 if self.accumulation_steps == 1 else int(self.buffer.batches.asnumpy())

    def flush(self) -> StepOutput | None:
        """Apply an unfinished window, divided by its true weight. Return None if there is none.

        Of several processes all must call it: one whose window is empty adds nothing to the others'.
        """
        if self.semi_auto is not None or not self._any_open_batches():
            return None
        output = self._close()
        return output if output.updated.asnumpy() or output.overflow.asnumpy() else None

    def _any_open_batches(self) -> bool:
        """Return whether some process has batches in the unfinished window."""
        batches = self.open_batches()
        return max(gather_counts(batches)) > 0 if self.parallel.several else batches > 0

    def drop(self) -> int:
        """Throw an unfinished window away and return the number of batches that it had."""
        batches = self.open_batches()
        if batches:
            self.buffer.clear()
        return batches

    def _abandon(self) -> None:
        """Take back what a failed batch has added: the sums cannot be parted, so an open window goes with it."""
        batches = self.open_batches()
        self.buffer.clear()
        warn_of_dropped(_OWNER, batches)

    def construct(self, *inputs: Any) -> tuple[Tensor, ...]:
        """The whole window as part of one graph. Return the items of a StepOutput."""
        return self.shown(self._run_in_graph(*inputs))

    def shown(self, items: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what a larger graph sees of the items of a StepOutput. Monitors of other projects see other ones."""
        return items

    def _run_in_graph(self, *inputs: Any) -> tuple[Tensor, ...]:
        check_compiling(self.semi_auto is not None)
        if self.semi_auto is not None:
            partitioned: tuple[Tensor, ...] = self.partitioned(*inputs)
            return partitioned
        parts = self.network.split_in_graph(inputs)
        batch_rows = Tensor(0.0, ms.float32)
        for part in parts:
            batch_rows = batch_rows + part[0]
        done = Tensor(0.0, ms.float32)
        for part in parts:
            share, factor = self.micro_step.share_and_factor(part[0], batch_rows)
            done = ops.depend(self.micro_step(share, factor, *part[1:])[2], done)
        if self.accumulation_steps == 1:
            output: tuple[Tensor, ...] = self.window(done)
            return output
        # The counter includes this batch, so that the update is made at the last batch of the window.
        batches = self.buffer.count_batch()
        if batches == self.accumulation_steps:
            output = self.window(done)
        else:
            output = self.window.open(done)
        return output
