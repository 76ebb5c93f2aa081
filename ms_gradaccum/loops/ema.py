"""The callback that averages the weights exponentially."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.train import Callback, RunContext

from ms_gradaccum._checks import Settled, argument_error, check_bool, check_number, typed
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.averages import Averages, averages_of, hold_averages
from ms_gradaccum.training.events import Observed, StatefulCallback, StepEvent, check_told
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "EMA"


class EMA(Settled, Callback, StatefulCallback):
    r"""Average the weights exponentially over the updates, and evaluate with the averages.

    After the update number :math:`t`, each average moves towards its weight:

    .. math::
        d_t = decay \cdot (1 - e^{-t / warmup\_updates}), \qquad ema = d_t \cdot ema + (1 - d_t) \cdot weight

    These are the formulas of mindcv and mindone, which always have 2000 `warmup_updates`; with 0 of them,
    :math:`d_t = decay`. :math:`t` counts optimizer updates: batches inside a window and windows that are skipped for an
    overflow move nothing. Averages are float32, also those of 16-bit weights, and begin as the weights are when the
    first update begins.

    The averages are Parameters of the training step, named ``ema.`` and the weight's name, with ``ema.updates`` beside
    them. So they are in the files of ``ModelCheckpoint``, and in the states of :func:`save_state` and
    :class:`StateCheckpoint`, which an EMA must be there to load: with HSDP, and on another number of processes, too.

    ``Model.train`` and ``Model.fit`` take it as a callback. In a loop of your own, and before `load_state` or
    ``mindspore.load_param_into_net`` of a step, give it to ``add_callback`` of the :class:`TrainOneStepCell` (of a
    Model, its ``train_network``) or the :class:`Accumulator`. Updates inside a graph are not told to callbacks: data
    sink mode takes `sink_size` 1, and a compiled function that trains does not move the averages.

    Args:
        decay (float): How much of the average an update keeps, between 0 and 1. Default: ``0.9999``.

    Keyword Args:
        warmup_updates (Union[int, float]): In how many updates the decay grows to 63 % of `decay`; 0 for no growth.
            Default: ``2000``.
        trainable_only (bool): Whether only the trainable parameters of the network are averaged, as in mindone. If not,
            all of floating point are, as in mindcv: the statistics of BatchNorm, too. Default: ``True``.
        evaluate (bool): Whether ``Model.fit`` and ``Model.eval`` with this callback evaluate the averages. In
            `on_eval_end`, callbacks after it in the list see the weights again, those before it the averages.
            Default: ``True``.

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

    def __init__(
        self,
        decay: float = 0.9999,
        *,
        warmup_updates: float = 2000,
        trainable_only: bool = True,
        evaluate: bool = True,
    ) -> None:
        super().__init__()
        self.decay = _check_decay(decay)
        remedy = "0 is for a decay that is constant."
        self.warmup_updates = check_number(_OWNER, "warmup_updates", warmup_updates, remedy)
        self.trainable_only = check_bool(_OWNER, "trainable_only", trainable_only, "The default is True.")
        self.evaluate = check_bool(_OWNER, "evaluate", evaluate, "The default is True.")
        self._averages: Averages | None = None
        # Whether it was an evaluation that has put the averages into the network.
        self._evaluates = False
        self._is_built = True

    def attach(self, step: Observed) -> None:
        """Give ``step`` the averages of its weights, unless it has them already."""
        there = averages_of(step)
        if there is not None and there is self._averages:
            return
        remedy = "Two would have the same names: give the step the EMA that it has, or build another step."
        if there is not None:
            raise ValueError(
                argument_error(_OWNER, "callback", "the only EMA of its training step", "a second one", remedy)
            )
        if self._averages is not None:
            got, remedy = "one that averages another's weights", "Build an EMA for each step."
            raise ValueError(argument_error(_OWNER, "callback", "an EMA of this training step", got, remedy))
        network = _network_of(step)
        network.init_parameters_data()
        parameters = network.trainable_params() if self.trainable_only else network.get_parameters()
        self._averages = Averages([each for each in parameters if each.dtype in mstype.float_type])
        hold_averages(step, self._averages)
        self._averages.copy_weights()

    @property
    def parameters(self) -> list[Parameter]:
        """The averages, in the order of the network's parameters."""
        return list(self._attached().values)

    @property
    def updates(self) -> int:
        """Number of updates that the averages have seen."""
        return self._attached().count()

    def swap(self) -> None:
        """Put the averages into the network, and keep the weights beside it. :meth:`restore` undoes it.

        Raises:
            RuntimeError: If they are there already, or it is not the callback of a training step yet.
        """
        self._attached().swap()

    def restore(self) -> None:
        """Put the weights back that :meth:`swap` has kept, exactly as they were.

        Raises:
            RuntimeError: If the averages are not in the network.
        """
        self._attached().restore()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Have the averages in the network inside a ``with``, and the weights after it, also after an exception.

        ``mindspore.save_checkpoint(network, ...)`` writes the averages there, under the names of the weights. Training
        inside it, and saving or loading a state, raises a RuntimeError.
        """
        self.swap()
        try:
            yield
        finally:
            self.restore()

    def on_micro_batch_begin(self, event: StepEvent) -> None:
        self._attached().check_weights_are_there(_OWNER, "the training must go on")

    def on_update_begin(self, event: StepEvent) -> None:
        averages = self._attached()
        averages.check_weights_are_there(_OWNER, "the training must go on")
        averages.begin()

    def on_update_end(self, event: StepEvent) -> None:
        if event.output is None or not event.output.is_updated:
            return
        averages = self._attached()
        decay = self.decay
        if self.warmup_updates > 0:
            decay *= -math.expm1(-(averages.count() + 1) / self.warmup_updates)
        # The share of the weight as it is: 1 - decay of a float32 decay is off by 1e-4 of itself.
        averages.run(Tensor(1.0 - decay, ms.float32))

    def on_train_begin(self, run_context: RunContext) -> None:
        params = run_context.original_args()
        check_told(_OWNER, "ema", params.train_network, self)
        # Of a larger sink it would hear of the last update alone.
        if params.get("dataset_sink_mode") and params.get("sink_size") != 1:
            got, remedy = params.get("sink_size"), "Or train with dataset_sink_mode=False."
            raise ValueError(argument_error(_OWNER, "sink_size", "1 in data sink mode", got, remedy))
        self._attached().begin()

    def on_eval_begin(self, run_context: RunContext) -> None:
        if not self.evaluate:
            return
        averages = self._attached()
        evaluated = {id(parameter) for parameter in run_context.original_args().eval_network.get_parameters()}
        if not any(id(parameter) in evaluated for parameter in averages.parameters):
            raise ValueError(
                f"For '{_OWNER}', the evaluated network must be the one whose weights are averaged, but got another. "
                f"Evaluate the Model that trains it, or leave this callback out."
            )
        if not averages.kept:
            averages.swap()
            self._evaluates = True

    def on_eval_end(self, run_context: RunContext) -> None:
        self._end_evaluation()

    def __exit__(self, *error: object) -> None:
        # After an error in the evaluation on_eval_end does not come.
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        if self._evaluates:
            self._evaluates = False
            self.restore()

    def _attached(self) -> Averages:
        if self._averages is None:
            raise RuntimeError(
                f"For '{_OWNER}', a training step must have it before there are averages, but got none yet. "
                f"Give it to Model.train, or to add_callback of the training step."
            )
        return self._averages


def _network_of(step: Any) -> nn.Cell:
    """Return the network whose weights a training step trains."""
    remedy = "Give it to a TrainOneStepCell, an Accumulator or a Model of ms_gradaccum."
    if isinstance(step, Accumulator):
        networks = step.windows
        if len(networks) > 1:
            got, remedy = f"{len(networks)} networks", "Build an Accumulator for the network that is averaged."
            raise ValueError(argument_error(_OWNER, "callback", "one for an Accumulator of one network", got, remedy))
        return networks[0].network
    if not isinstance(step, TrainOneStepCell):
        rule = "one for a training step of ms_gradaccum"
        raise TypeError(argument_error(_OWNER, "callback", rule, type(step).__name__, remedy))
    if not step.windows[0].reducers:
        got, remedy = "AutoParallel, which cuts the weights", "Use DataParallel() or HSDP()."
        raise ValueError(argument_error(_OWNER, "callback", "one for a step that has whole weights", got, remedy))
    return step.network


def _check_decay(value: Any) -> float:
    remedy = "0.9999 is usual: an average over some 10000 updates."
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(argument_error(_OWNER, "decay", "a number between 0 and 1", typed(value), remedy))
    if not 0 < value < 1:
        raise ValueError(argument_error(_OWNER, "decay", "a number between 0 and 1", value, remedy))
    return float(value)
