"""Exponential averages of the parameters, which are parameters of the training step."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.train import Callback, RunContext

from ms_gradaccum._checks import Settled, check_bool, check_number, check_positive_float, require
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.kernels import add_in_place
from ms_gradaccum.backend.tensors import Done, chunk_of, chunks_of, copy_after, map_tensors
from ms_gradaccum.gradients.buffer import zeros
from ms_gradaccum.training.events import StatefulCallback, StepEvent, check_told

_OWNER = "EMA"


def _move(share: Tensor, average: Parameter, weight: Parameter) -> Tensor:
    return add_in_place(average, (ops.cast(weight, ms.float32) - average) * share)


class Averages(nn.Cell):
    """The averages of the parameters of a network, in float32, and the number of updates that they include."""

    kept: tuple[Tensor, ...] = ()  # The parameters' values while the averages are in the network; empty otherwise.

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(parameters)
        self.values = ParameterTuple(zeros(f"ema.{parameter.name}", tuple(parameter.shape)) for parameter in parameters)
        self.updates = zeros("ema.updates", (), ms.int32)
        self.init_parameters_data()
        self.chunks = chunks_of([value.size for value in self.values])
        self.run = Compiled(lambda: self, _OWNER, "the averages")
        self.begin()

    def construct(self, least: Tensor, growth: Tensor, rate: Tensor) -> Tensor:
        """Count update t, and move the averages by `least + growth * exp(-rate * t)` of the way to the parameters."""
        count = ops.assign_add(self.updates, Tensor(1, ms.int32))
        share = least + growth * ops.exp(-rate * ops.cast(count, ms.float32))
        done: Done = ()
        for begin, end in self.chunks:
            move = ops.partial(_move, copy_after(share, done))
            done = map_tensors(move, chunk_of(self.values, begin, end), chunk_of(self.parameters, begin, end))
        return copy_after(share, done)

    def begin(self) -> None:
        """Before the first update, start from the parameters, which may have been loaded since. It reads the device."""
        self.check_weights(_OWNER)
        if self.updates.asnumpy() == 0:
            _assign(self.values, self.parameters)

    def check_weights(self, owner: str) -> None:
        """Raise if the averages have replaced the parameters in the network."""
        if self.kept:
            raise RuntimeError(
                f"For '{owner}', the network must have its weights, but got the averages of an EMA in their place. "
                f"Leave 'with ema.swapped():' first."
            )


class EMA(Settled, Callback, StatefulCallback):
    r"""Average the weights exponentially over the updates, and evaluate with the averages.

    After optimizer update number :math:`t` (skipped windows make none), each average moves towards its weight:

    .. math::
        d_t = decay \cdot (1 - e^{-t / warmup\_updates}), \qquad ema = d_t \cdot ema + (1 - d_t) \cdot weight

    These are the formulas of mindcv and mindone, which always have 2000 `warmup_updates`. The averages are float32,
    begin as the weights are at the first update, and are Parameters of the training step, named ``ema.`` and the
    weight's name, beside ``ema.updates``: its checkpoints and states have them. Add an EMA before loading one.

    ``Model.train`` and ``Model.fit`` take it as a callback. In a loop of your own, give it to ``add_callback`` of the
    :class:`TrainOneStepCell` or the :class:`Accumulator`. Callbacks do not see updates inside a graph: data sink mode
    takes `sink_size` 1, and a compiled function that trains does not move the averages.

    Args:
        decay (float): Share of the average that an update keeps, between 0 and 1. Default: ``0.9999``.

    Keyword Args:
        warmup_updates (Union[int, float]): Number of updates in which the decay grows to 63 % of `decay`; 0 for no
            growth. Default: ``2000``.
        trainable_only (bool): Whether only the trainable parameters are averaged, as in mindone, or all of floating
            point, as in mindcv: the statistics of BatchNorm, too. Default: ``True``.
        evaluate (bool): Whether ``Model.fit`` and ``Model.eval`` with this callback evaluate the averages. Callbacks
            after it in the list see the weights again in `on_eval_end`. Default: ``True``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `decay` is not between 0 and 1, or `warmup_updates` is negative or not finite.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import NumpySlicesDataset
        >>> from ms_gradaccum import EMA, Model
        >>> x = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
        >>> dataset = NumpySlicesDataset((x, 2 * x), shuffle=False).batch(2)
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.02), accumulation_steps=4)
        >>> ema = EMA(0.5, warmup_updates=0)
        >>> model.train(1, dataset, callbacks=ema)
        >>> with ema.swapped():
        ...     print(network.weight.value())
        [[1.02]]
        >>> print(network.weight.value(), ema.parameters[0].name)
        [[2.04]] ema.weight
    """

    _averages: Averages | None = None

    def __init__(
        self, decay: float = 0.9999, *, warmup_updates: float = 2000, trainable_only: bool = True, evaluate: bool = True
    ) -> None:
        super().__init__()
        remedy = "0.9999 is usual: an average over some 10000 updates."
        self.decay = check_positive_float(_OWNER, "decay", decay, remedy)
        require(self.decay < 1, _OWNER, "decay", "a number below 1", decay, remedy)
        self.warmup_updates = warmup = check_number(_OWNER, "warmup_updates", warmup_updates, "0 is for no growth.")
        # The share 1 - d_t, in numbers that float32 holds: 1 - decay of a float32 decay would be off by 1e-4 of itself.
        shares = (1.0 - self.decay, self.decay if warmup else 0.0, 1.0 / warmup if warmup else 0.0)
        self._shares = [Tensor(share, ms.float32) for share in shares]
        self.trainable_only = check_bool(_OWNER, "trainable_only", trainable_only, "The default is True.")
        self.evaluate = check_bool(_OWNER, "evaluate", evaluate, "The default is True.")
        self._evaluation = ExitStack()  # Restores the weights after an evaluation.
        self._is_built = True

    def attach(self, step: nn.Cell) -> None:
        """Give ``step`` the averages of its weights, unless it has them already."""
        there, windows = averages_of(step), step.windows
        if self._averages in there:
            return
        is_new = self._averages is None and not there
        network = windows[0].network
        candidates = network.trainable_params() if self.trainable_only else network.get_parameters()
        parameters = [parameter for parameter in candidates if parameter.dtype in mstype.float_type]
        whole, several = "one for a step that has whole weights", "one for an Accumulator of one network"
        for holds, rule, got, remedy in (
            (is_new, "the only one of one training step", "a second EMA or step", "Build an EMA for each step."),
            (len(windows) == 1, several, f"{len(windows)} networks", "Build one for the network that is averaged."),
            (windows[0].reducers, whole, "AutoParallel, which cuts the weights", "Use DataParallel() or HSDP()."),
            (parameters, "one for a network with parameters to average", 0, "Set requires_grad, or trainable_only."),
        ):
            require(holds, _OWNER, "callback", rule, got, remedy)
        network.init_parameters_data()
        self._averages = step.ema_averages = Averages(parameters)

    @property
    def parameters(self) -> list[Parameter]:
        """The averages, in the order of the network's parameters."""
        return list(self._attached().values)

    @property
    def updates(self) -> int:
        """Number of updates that the averages have seen."""
        return int(self._attached().updates.asnumpy())

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context that has the averages in the network, and the weights after it, also after an exception.

        ``mindspore.save_checkpoint(network, ...)`` writes the averages there, under the names of the weights. Training
        inside it, and saving or loading a state, raises a RuntimeError.
        """
        averages = self._attached()
        averages.begin()
        # Tensors, since parameters would be the step's. A tensor of a parameter shares its memory: of a copy, then.
        averages.kept = tuple(Tensor(parameter.copy()) for parameter in averages.parameters)
        try:
            _assign(averages.parameters, averages.values)
            yield
        finally:
            _assign(averages.parameters, averages.kept)
            averages.kept = ()

    def on_micro_batch_begin(self, event: StepEvent) -> None:
        self._attached().check_weights(_OWNER)

    def on_update_begin(self, event: StepEvent) -> None:
        self._attached().begin()

    def on_update_end(self, event: StepEvent) -> None:
        if event.output is not None and event.output.is_updated:
            self._attached().run(*self._shares)

    def on_train_begin(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        check_told(_OWNER, "ema", params.train_network, self)
        # It would be told only of the last update of a larger sink.
        size = params.get("sink_size") if params.get("dataset_sink_mode") else 1
        require(size == 1, _OWNER, "sink_size", "1 in data sink mode", size, "Or train with dataset_sink_mode=False.")

    def on_eval_begin(self, run_context: RunContext) -> None:
        if not self.evaluate:
            return
        averages = self._attached()
        evaluated = set(map(id, run_context.original_args().eval_network.get_parameters()))
        is_own = not evaluated.isdisjoint(map(id, averages.parameters))
        rule, remedy = "the one whose weights are averaged", "Evaluate the Model that trains it, or without its EMA."
        require(is_own, _OWNER, "eval_network", rule, "another", remedy)
        if not averages.kept:
            self._evaluation.enter_context(self.swapped())

    def on_eval_end(self, run_context: RunContext) -> None:
        self._evaluation.close()

    def __exit__(self, *error: object) -> None:
        # After an error in the evaluation, on_eval_end is not called.
        self._evaluation.close()

    def _attached(self) -> Averages:
        if self._averages is None:
            raise RuntimeError(
                f"For '{_OWNER}', a training step must have it before there are averages, but got none yet. "
                f"Give it to Model.train, or to add_callback of the training step."
            )
        return self._averages


def averages_of(step: nn.Cell) -> list[Averages]:
    """Return the averages of a training step: one item if it has an EMA, else none."""
    return [step.ema_averages] if hasattr(step, "ema_averages") else []


def _assign(targets: Sequence[Parameter], values: Sequence[Tensor]) -> None:
    """Copy tensors into parameters, one by one from the host, which needs no compilation and happens rarely."""
    for target, value in zip(targets, values, strict=True):
        ops.assign(target, ops.cast(value, target.dtype))
