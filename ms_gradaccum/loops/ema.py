"""Exponential averages of the parameters, which are parameters of the training step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.train import Callback, RunContext

from ms_gradaccum._checks import (
    FrozenAfterInit,
    check_bool,
    check_float,
)
from ms_gradaccum.backend.arithmetic import Tensors, add_in_place
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.tensors import Done, chunk_of, chunks_of, copy_after, map_tensors
from ms_gradaccum.gradients.buffer import zeros
from ms_gradaccum.training.events import Extra, Observed, StepEvent, check_told

_OWNER = "EMA"


def _move(share: Tensor, average: Parameter, weight: Parameter) -> Tensor:
    return add_in_place(average, (ops.cast(weight, ms.float32) - average) * share)


class EMA(FrozenAfterInit, Extra, Callback):
    r"""Average the weights exponentially over the updates, and evaluate with the averages.

    At optimizer update :math:`t` (skipped windows make none), each average moves as in mindcv and mindone:

    .. math::
        d_t = decay \cdot (1 - e^{-t / warmup\_updates}), \qquad ema = d_t \cdot ema + (1 - d_t) \cdot weight

    The averages are float32 and start from the weights before the first update. They are Parameters of the training
    step, ``ema.weight`` for ``weight``, with ``ema.updates``, so its checkpoints and states contain them. Before you
    load one, add the EMA as a callback of ``Model.train`` or ``Model.fit``, or by ``add_callback``. It does not see
    updates inside a graph: data sink mode needs `sink_size` 1, and a compiled training function moves no averages.

    Args:
        decay (float): Share of the average that an update keeps, between 0 and 1. Default: ``0.9999``.

    Keyword Args:
        warmup_updates (Union[int, float]): Number of updates in which the decay grows to 63 % of `decay`; 0 for no
            growth. Default: ``2000``.
        trainable_only (bool): Whether BatchNorm's statistics and the like are left out. Default: ``True``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `decay` or `warmup_updates` is out of range.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import EMA, TrainOneStepCell
        >>> x = ops.arange(1, 9).float().reshape(8, 1)
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> optimizer = nn.SGD(network.trainable_params(), 0.02)
        >>> train_step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
        >>> ema = EMA(0.5, warmup_updates=0)
        >>> train_step.add_callback(ema)
        >>> output = train_step(x, 2 * x)
        >>> with ema.swapped():
        ...     print(network.weight.value())
        [[1.02]]
        >>> print(network.weight.value(), ema.parameters[0].name)
        [[2.04]] ema.weight
    """

    # The averaged parameters; empty until the EMA belongs to a training step.
    weights: tuple[Parameter, ...] = ()
    values: tuple[Parameter, ...] = ()  # Their averages.
    kept: Tensors = ()  # Their values while the averages are in the network.

    def __init__(
        self, decay: float = 0.9999, *, warmup_updates: float = 2000, trainable_only: bool = True
    ) -> None:
        super().__init__(auto_prefix=False)
        remedy = "0.9999 is usual: it averages about 10000 updates."
        self.decay = check_float(_OWNER, "decay", decay, remedy, below=1)
        self.warmup_updates = check_float(
            _OWNER, "warmup_updates", warmup_updates, "0 means no growth.", least=0
        )
        # The share 1 - d_t, computed in float64: with a float32 decay, the relative error of 1 - decay would be 1e-4.
        shares = [1.0 - self.decay, 0.0, 0.0]
        if self.warmup_updates:
            shares[1:] = [self.decay, 1.0 / self.warmup_updates]
        self._shares = [Tensor(share, ms.float32) for share in shares]
        self.trainable_only = check_bool(
            _OWNER, "trainable_only", trainable_only, "The default is True."
        )
        self._evaluation = ExitStack()  # Restores the weights after an evaluation.
        self._is_built = True

    def attach(self, step: Observed) -> None:
        if self.weights or any(isinstance(each, EMA) for each in step.extras):
            raise ValueError(
                "For 'EMA', a training step must have one EMA of its own, but got a second EMA or "
                "step. Build an EMA for each step."
            )
        window = _window_of(step)
        network = window.network
        candidates = network.trainable_params() if self.trainable_only else network.get_parameters()
        weights = tuple(
            parameter for parameter in candidates if parameter.dtype in mstype.float_type
        )
        if not weights:
            raise ValueError(
                "For 'EMA', the network must have parameters to average, but got 0. Set "
                "requires_grad, or trainable_only=False."
            )
        network.init_parameters_data()
        self._window = window
        window.reshard()
        self.values = ParameterTuple(
            zeros(f"ema.{weight.name}", tuple(weight.shape)) for weight in weights
        )
        self.count = zeros("ema.updates", (), ms.int32)
        self.init_parameters_data()
        self.tensor_chunks = chunks_of([value.size for value in self.values])
        self.__dict__["weights"] = ParameterTuple(weights)  # A Cell would register them as its own.
        self.run = Compiled(lambda: self, _OWNER, "the averages")
        self.start()

    def agreed(self) -> str:
        return f"EMA({self.decay}, warmup_updates={self.warmup_updates:g})"

    def construct(self, least: Tensor, growth: Tensor, rate: Tensor) -> Tensor:
        """Count update t, and move the averages by `least + growth * exp(-rate * t)` of the way to the weights."""
        count = ops.assign_add(self.count, Tensor(1, ms.int32))
        share = least + growth * ops.exp(-rate * ops.cast(count, ms.float32))
        done: Done = ()
        for begin, end in self.tensor_chunks:
            move = ops.partial(_move, copy_after(share, done))
            done = map_tensors(
                move, chunk_of(self.values, begin, end), chunk_of(self.weights, begin, end)
            )
        return copy_after(share, done)

    def start(self) -> None:
        """Before the first update, copy the weights, which may have been loaded after `attach`."""
        if not self.weights:
            raise RuntimeError(
                "For 'EMA', the EMA must belong to a training step, but got none. Call "
                "train_step.add_callback(ema)."
            )
        self.check_can_save(_OWNER)
        self._window.reshard()
        if self.updates == 0:
            _assign(self.values, self.weights)

    def check_can_save(self, owner: str) -> None:
        """Raise if the averages are in the network."""
        if self.kept:
            raise RuntimeError(
                f"For '{owner}', the network must have its own weights, but got the averages of an "
                f"EMA. Leave ema.swapped() first."
            )

    @property
    def parameters(self) -> list[Parameter]:
        """The averages, in the order of the network's parameters."""
        return list(self.values)

    @property
    def updates(self) -> int:
        """Number of updates that the averages have seen."""
        return int(self.count.asnumpy()) if self.weights else 0

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Context with the averages in the network. Training, saving and loading a state raise an error inside it."""
        self.start()
        # Tensors, since parameters would belong to the step; copied, since they would share the weights' memory.
        self.kept = tuple(Tensor(weight.copy()) for weight in self.weights)
        try:
            _assign(self.weights, self.values)
            yield
        finally:
            self._window.reshard()
            _assign(self.weights, self.kept)
            self.kept = ()

    def on_micro_batch_begin(self, event: StepEvent) -> None:
        self.check_can_save(_OWNER)

    def on_update_begin(self, event: StepEvent) -> None:
        self.start()

    def on_update_end(self, event: StepEvent) -> None:
        if event.output is not None and event.output.is_updated:
            self.run(*self._shares)

    def on_train_begin(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        check_told(_OWNER, "ema", params.train_network, self)
        # In a larger sink, the EMA would see only the last update.
        size = params.get("sink_size")
        if params.get("dataset_sink_mode") and size != 1:
            raise ValueError(
                f"For 'EMA', the argument 'sink_size' must be 1 in data sink mode, but got {size}. "
                f"Give sink_size=1, or dataset_sink_mode=False."
            )
        self.start()  # A graph does not announce its updates.

    def on_eval_begin(self, run_context: RunContext) -> None:
        if not self.weights:
            self.start()
        evaluated = set(map(id, run_context.original_args().eval_network.get_parameters()))
        if evaluated.isdisjoint(map(id, self.weights)):
            raise ValueError(
                "For 'EMA', the argument 'eval_network' must have the averaged weights, but got "
                "another network. Evaluate the Model that trains it, or leave the EMA out."
            )
        if not self.kept:
            self._evaluation.enter_context(self.swapped())

    def on_eval_end(self, *_: object) -> None:
        self._evaluation.close()

    __exit__ = on_eval_end  # After an error in the evaluation, only this one is called.


def _window_of(step: Any) -> Any:
    """Return the window of the network that is averaged."""
    window, *others = step.windows
    if others:
        raise ValueError(
            "For 'EMA', an EMA averages one network, but got an Accumulator of several. Build an "
            "Accumulator for the network to average."
        )
    if not window.reducers:
        raise ValueError(
            "For 'EMA', an EMA needs whole weights, but got AutoParallel. Use DataParallel() or "
            "HSDP()."
        )
    return window


def _assign(targets: tuple[Parameter, ...], values: Tensors) -> None:
    """Copy tensors into parameters, one by one from the host. This is rare, and needs no compilation."""
    for target, value in zip(targets, values, strict=True):
        ops.assign(target, ops.cast(value, target.dtype))
