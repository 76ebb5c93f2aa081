"""``mindspore.train.Model`` that trains with gradient accumulation."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import mindspore as ms
from mindspore import amp, nn
from mindspore.dataset import Dataset
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.train import Callback, Metric

from ms_gradaccum._checks import (
    FrozenAfterInit,
    check_bool,
    check_cell,
    check_choice,
    listed,
    refuse_unknown,
    typed,
    warn,
)
from ms_gradaccum.advice.network_modes import FREEZE, frozen_cell
from ms_gradaccum.backend.device import can_partition, has_data_sink
from ms_gradaccum.backend.mindspore_private import (
    CallbackManager,
    InternalCallbackParam,
    clear_auto_parallel_context,
)
from ms_gradaccum.backend.optimizers import OPTIMIZERS, check_optimizer, trains_itself
from ms_gradaccum.gradients.mixed_precision import Level, combined
from ms_gradaccum.loops.data_position import (
    DataPosition,
    first_batch,
    is_unbatched,
    warn_of_single_rows,
)
from ms_gradaccum.loops.epoch import (
    LastWindow,
    PassSteps,
    ResumingCallback,
    StopTogether,
    check_last_window,
)
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.factory import check_parallel
from ms_gradaccum.parallel.semi_auto import is_semi_auto
from ms_gradaccum.parallel.world import check_agreement
from ms_gradaccum.static_graph.settings import forget_accumulation
from ms_gradaccum.training.events import Extra
from ms_gradaccum.training.grad_accumulation import GradAccumulation, adopted, as_grad_accumulation
from ms_gradaccum.training.settings import StepOptions, StepSettings, changed_options, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWNER = "Model"


class Model(FrozenAfterInit, ms.Model):
    r"""Train, evaluate and predict as ``mindspore.train.Model`` does, with gradient accumulation.

    `train`, `fit`, `eval`, `predict` and callbacks work as they are documented there. One call of the training network
    takes one batch of the dataset; callbacks find a :class:`StepOutput` in ``cb_params.net_outputs``. `train` sets all
    cells to training mode at its first step.

    Args:
        network (Cell): A :class:`GradAccumulation`, alone or inside ``AutoParallel``, around a network with its
            loss inside, or without it if `loss_fn` is given. Or a network without GradAccumulation, whose batches are
            then not split; or a :class:`TrainOneStepCell`, which has its own optimizer.
        loss_fn (Cell, optional): Loss of the network's output and the label. Default: ``None``.
        optimizer (Cell, optional): Optimizer of the network's parameters. Without one, the model can only evaluate and
            predict, or train a `network` that is a training cell with settings of its own. Default: ``None``.
        metrics (Union[dict, set], optional): Metrics of `eval` and `fit`. Default: ``None``.
        eval_network (Cell, optional): Network of `eval`. By default it is built from `network` and `loss_fn`, or from
            an ``nn.WithLossCell`` in `network`. Default: ``None``.
        eval_indexes (list, optional): Places of loss, output and label in the outputs of `eval_network`.
            Default: ``None``.
        amp_level (str): ``"O0"`` (no mixed precision), ``"O1"``, ``"O2"``, ``"O3"`` or ``"auto"``: the cells that
            compute in float16, see :class:`MixedPrecision`. The loss scale is its own or `mixed_precision`.
            Default: ``"O0"``.
        boost_level (str): Only ``"O0"``: boost's own accumulation would run inside this one. Default: ``"O0"``.

    Keyword Args:
        accumulation_steps (Union[int, dict[int, int], BySamples, Callable]): Number of batches of one update. A dict
            goes from epochs, counted from 0, to the batches per window from there on (1 before the first key), a
            :class:`BySamples` from samples; a function gets the number of updates so far. A schedule counts when a
            window begins, and not in data sink mode. Default: ``1``.
        clip (Union[ClipByGlobalNorm, ClipByGroupNorm, ClipByValue, Cell, None]): As for :class:`TrainOneStepCell`.
            Default: ``None``.
        skip_above (Union[float, NormSpike, None]): As for :class:`TrainOneStepCell`. Default: ``None``.
        mixed_precision (Union[str, MixedPrecision, LossScaler, LossScaleManager, None]): As for
            :class:`TrainOneStepCell`. Default: ``None``.
        parallel (Union[str, DataParallel, HSDP, Reduced]): ``"auto"``: no communication in one process, the settings of
            an ``AutoParallel`` around `network`, or data parallel otherwise. Default: ``"auto"``.
        last_window (str): Treatment of a window that is unfinished at the end of a pass over the dataset:
            ``"apply"``: one more update, divided by the window's true weight, before the evaluation of `fit`;
            ``"drop"``: its gradients are thrown away; ``"carry"``: it goes on with the next pass.
            Default: ``"apply"``.
        bad_micro_batch (str): As for :class:`TrainOneStepCell`. Default: ``"skip_window"``.
        compile (Union[bool, None]): As for :class:`TrainOneStepCell`. Default: ``None``.
        check_loss (bool): As for :class:`TrainOneStepCell`. Default: ``True``.
        loss_scale_manager (LossScaleManager, optional): The name of `mixed_precision` in ``mindspore.train.Model``.
            Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, `optimizer` belongs to another network, or a setting is
            given that cannot work with accumulation, or beside a training cell that would not obey it; in `train` and
            `fit`, if there is no optimizer.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from mindspore.dataset import NumpySlicesDataset
        >>> from ms_gradaccum import GradAccumulation, Model
        >>> x = np.arange(1, 9, dtype=np.float32).reshape(8, 1)
        >>> dataset = NumpySlicesDataset((x, 2 * x), shuffle=False).batch(8)
        >>> network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        >>> loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=4)
        >>> model = Model(loss_cell, optimizer=nn.SGD(network.trainable_params(), 0.02))
        >>> model.train(1, dataset)
        >>> print(network.weight.value())
        [[2.04]]
    """

    _obeyed = {"last_window": partial(check_last_window, _OWNER)}
    # The first callback of the current training; True to resume from a state; and the place of a loaded state.
    _steps: PassSteps | None = None
    _resume = _has_trained = False
    # True once the first training has compared a list of learning rates with its updates.
    has_rates_checked = False
    resumed_position: DataPosition | None = None

    @takes_options(StepOptions)
    def __init__(
        self,
        network: nn.Cell,
        loss_fn: nn.Cell | None = None,
        optimizer: nn.Cell | None = None,
        metrics: Mapping[str, Metric] | AbstractSet[str] | None = None,
        eval_network: nn.Cell | None = None,
        eval_indexes: list[int] | None = None,
        amp_level: Level = "O0",
        boost_level: Literal["O0"] = "O0",
        *,
        last_window: LastWindow = "apply",
        loss_scale_manager: amp.LossScaleManager | None = None,
        **options: "Unpack[StepOptions]",
    ) -> None:
        check_choice(
            _OWNER,
            "boost_level",
            boost_level,
            ("O0",),
            "Boost would run an accumulation of its own inside this one.",
        )
        self.last_window = check_last_window(_OWNER, last_window)
        self.loss_scale_manager = loss_scale_manager
        refuse_unknown(_OWNER, Model.__init__, options)
        precision = combined(_OWNER, options.get("mixed_precision"), amp_level, loss_scale_manager)
        options["mixed_precision"] = precision
        self._options = options
        # The stock Model takes only the name of the level, by which its evaluation casts half-precision outputs.
        level = "O0"
        if optimizer is not None and precision is not None:
            level = precision.level
        check_cell(
            _OWNER,
            "network",
            network,
            "Give a GradAccumulation, a loss cell, or a network and a loss_fn.",
        )
        if loss_fn is not None:
            check_cell(
                _OWNER,
                "loss_fn",
                loss_fn,
                "For example nn.MSELoss(); None if network has its loss inside.",
            )
        if eval_network is not None:
            check_cell(
                _OWNER,
                "eval_network",
                eval_network,
                "Leave it out to evaluate network and loss_fn.",
            )
        for name, cell in (
            ("network", network),
            ("loss_fn", loss_fn),
            ("eval_network", eval_network),
        ):
            if isinstance(cell, OPTIMIZERS):
                raise TypeError(
                    f"For '{_OWNER}', the argument '{name}' must not be an optimizer, but got "
                    f"{type(cell).__name__}. Give it as optimizer=."
                )
        network = adopted(network)
        if isinstance(network, AutoParallel) and not can_partition():
            # Its settings are handled here. If the Model set them, the compiler would look for another device.
            if options.get("parallel", "auto") == "auto" and optimizer is not None:
                options["parallel"] = check_parallel(_OWNER, "auto", network) or ("auto")  # type: ignore[typeddict-item]
            network = adopted(network.network)
        elif isinstance(network, AutoParallel) and adopted(network.network) is not network.network:
            raise ValueError(
                "For 'Model', the argument 'network' must be a GradAccumulation of ms_gradaccum, "
                "but got MindSpore's, which evaluates the sum of a batch's losses. Write 'from "
                "ms_gradaccum import GradAccumulation'."
            )
        try:
            super().__init__(
                network, loss_fn, optimizer, metrics, eval_network, eval_indexes, level
            )
        except BaseException:
            # The context was set from the network above, and would change the next compilation.
            clear_auto_parallel_context(network)
            raise
        self._is_built = True

    def _build_train_network(self) -> nn.Cell:
        inner = self._network
        if isinstance(inner, AutoParallel):
            inner = inner.network
        if isinstance(inner, TrainOneStepCell):
            return self._adopt(inner)
        if self._optimizer is None:
            self._refuse_settings(inner)
            return super()._build_train_network()
        loss_cell = as_grad_accumulation(_OWNER, self._network)
        if self._loss_fn is not None:
            loss_cell = loss_cell.with_loss(self._loss_fn)
        # Checked here first, since the step's errors would name the step.
        StepSettings.checked(_OWNER, **self._options)
        check_optimizer(_OWNER, self._optimizer, loss_cell)
        return TrainOneStepCell(loss_cell, self._optimizer, **self._options)

    def _build_eval_network(
        self, metrics: object, eval_network: nn.Cell | None, eval_indexes: list[int] | None
    ) -> None:
        if metrics and eval_network is None and self._loss_fn is None:
            # Evaluate a network with its loss inside as MindSpore evaluates a network and a loss.
            loss_cell = self._network
            for kind in (AutoParallel, TrainOneStepCell, GradAccumulation):
                if isinstance(loss_cell, kind):
                    loss_cell = loss_cell.network
            if type(loss_cell) is not nn.WithLossCell:
                raise ValueError(
                    f"For 'Model', the argument 'eval_network' must be given with metrics, but got "
                    f"None beside {type(loss_cell).__name__}. Give "
                    f"eval_network=nn.WithEvalCell(network, loss_fn), or network and loss_fn "
                    f"separately."
                )
            casts = self._amp_level in ("O2", "O3", "auto")
            eval_network = nn.WithEvalCell(loss_cell.backbone_network, loss_cell._loss_fn, casts)
            eval_indexes = [0, 1, 2]
        super()._build_eval_network(metrics, eval_network, eval_indexes)

    def _adopt(self, train_step: TrainOneStepCell) -> TrainOneStepCell:
        """Train with a step that the user built; its settings are its own."""
        if self._optimizer is not None or self._loss_fn is not None:
            raise ValueError(
                "For 'Model', the argument 'network' must be a loss cell, but got a "
                "TrainOneStepCell together with a loss_fn or an optimizer. Give Model(train_step), "
                "or the cell inside it with the optimizer."
            )
        if isinstance(self._network, AutoParallel) and is_semi_auto(self._network):
            raise ValueError(
                "For 'Model', the argument 'network' must be a loss cell in AutoParallel, but got "
                "AutoParallel around a TrainOneStepCell. Put AutoParallel inside that cell."
            )
        if changed_options(self._options):
            raise ValueError(
                "For 'Model', the argument 'network' must be a loss cell, but got a "
                "TrainOneStepCell with its own settings. Give accumulation_steps, clip and the "
                "like to the TrainOneStepCell."
            )
        # For callbacks that change the learning rate.
        self._optimizer: nn.Cell = train_step.optimizer
        return train_step

    def _refuse_settings(self, network: nn.Cell) -> None:
        """Raise for settings beside a training cell of the program, which would not obey them."""
        given = changed_options(self._options)
        if self.last_window != "apply":
            given.append("last_window")
        if given and trains_itself(network):
            raise ValueError(
                f"For '{_OWNER}', the training cell {type(network).__name__} has its own settings "
                f"and ignores {listed(given, 3)}. Give the loss cell inside it, and optimizer=."
            )

    def train(
        self,
        epoch: int,
        train_dataset: Dataset,
        callbacks: Callback | Iterable[Callback] | None = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        resume: bool = False,
    ) -> None:
        """Train, see ``mindspore.train.Model.train``.

        Args:
            epoch (int): Number of passes over the data, including those before a resumption.
            train_dataset (Dataset): The data.
            callbacks (Union[Callback, list[Callback], None]): Callbacks. Default: ``None``.
            dataset_sink_mode (bool): Whether to send the data to the device in data sink mode. Default: ``False``.
            sink_size (int): Number of batches of a sink, which is MindSpore's epoch in data sink mode; ``-1``: those of
                a pass. Default: ``-1``.
            initial_epoch (int): Number of the first pass. Default: ``0``.

        Keyword Args:
            resume (bool): Whether to continue from the last state of the :class:`StateCheckpoint` among `callbacks`, or
                from a previous :func:`load_state`. Without a state the training starts anew; a finished training does
                nothing, so you can always run the program again. Default: ``False``.
        """
        with self._resuming(resume, initial_epoch, train_dataset):
            super().train(
                epoch, train_dataset, callbacks, dataset_sink_mode, sink_size, initial_epoch
            )

    def fit(
        self,
        epoch: int,
        train_dataset: Dataset,
        valid_dataset: Dataset | None = None,
        valid_frequency: int | list[int] = 1,
        callbacks: Callback | Iterable[Callback] | None = None,
        dataset_sink_mode: bool = False,
        valid_dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        resume: bool = False,
    ) -> None:
        """Train and evaluate, see ``mindspore.train.Model.fit``; ``resume`` as in `train`."""
        with self._resuming(resume, initial_epoch, train_dataset):
            super().fit(
                epoch,
                train_dataset,
                valid_dataset,
                valid_frequency,
                callbacks,
                dataset_sink_mode,
                valid_dataset_sink_mode,
                sink_size,
                initial_epoch,
            )

    @contextmanager
    def _resuming(self, resume: bool, initial_epoch: int, dataset: Dataset) -> Iterator[None]:
        if not hasattr(dataset, "get_dataset_size"):
            raise TypeError(
                f"For 'Model', the argument 'train_dataset' must be a dataset of "
                f"mindspore.dataset, but got {typed(dataset)}. Write GeneratorDataset(...), or a "
                f"loop with an Accumulator, which takes any data."
            )
        check_bool(_OWNER, "resume", resume, "True continues from the last state.")
        if resume and initial_epoch != 0:
            raise ValueError(
                f"For 'Model', the argument 'initial_epoch' must be 0 with resume=True, but got "
                f"{initial_epoch}. The state knows its pass."
            )
        trains = isinstance(self._train_network, TrainOneStepCell)
        if not (trains or trains_itself(self._train_network)):
            raise ValueError(
                f"For '{_OWNER}', the argument 'optimizer' must be given for a training, but got "
                f"None. Give the loss cell and its optimizer, as in Model(loss_cell, "
                f"optimizer=optimizer)."
            )
        if trains and not self._has_trained and (frozen := frozen_cell(self._network)):
            warn(
                f"For '{_OWNER}', train() sets all cells to training mode, also {frozen}, which "
                f"was in evaluation mode. Freeze it with {FREEZE}."
            )
        self._resume = resume
        self._has_trained = trains
        try:
            yield
        finally:
            self._resume = False

    def _train(
        self, epoch: int, train_dataset: Dataset, callbacks: Any = None, **kwargs: Any
    ) -> object:
        callbacks = self._transform_callbacks(callbacks)
        train_step = self._train_network
        if not isinstance(train_step, TrainOneStepCell):
            return super()._train(epoch, train_dataset, callbacks=callbacks, **kwargs)
        if train_step.windows[0].is_distributed:
            self._agree(epoch, callbacks, kwargs)
        # The callbacks' tensors must exist before a state with them is loaded.
        train_step.adopt(callbacks)
        if is_unbatched(train_dataset):
            warn_of_single_rows(_OWNER, first_batch(train_dataset))
        steps = PassSteps(self, callbacks, train_dataset, kwargs.get("initial_epoch", 0), epoch)
        if not self._resume:
            self.resumed_position = None
        elif not steps.resume(epoch, kwargs):
            return None
        # Ours comes first, since the others see its changes; the states come last, since they save all changes.
        others = [each for each in callbacks if each not in steps.checkpoints]
        callbacks = [steps, *others, *steps.checkpoints]
        if train_step.windows[0].is_distributed:
            callbacks.append(StopTogether())
        self._steps = steps
        if kwargs.get("dataset_sink_mode") and has_data_sink():
            train_step.body.check_in_graph()
            # A graph will train the batches, so the loss must be measured before.
            train_step.body.measure_loss(first_batch(train_dataset))
        train_step.body.epoch_of = steps.epoch_of
        try:
            with ExitStack() as stack:
                stack.enter_context(train_step.events.listening(callbacks))
                stack.enter_context(steps.order.begun())
                for checkpoint in steps.checkpoints:
                    stack.enter_context(checkpoint.watching(self))
                # MindSpore's wrappers, which save a last checkpoint, look for the keyword `callbacks`.
                return super()._train(epoch, train_dataset, callbacks=callbacks, **kwargs)
        except BaseException:
            if self.last_window != "carry":
                # The next training must not start in the middle of this window.
                train_step.drop()
            raise
        finally:
            self._steps = None
            train_step.body.epoch_of = None

    def _agree(
        self, epoch: int, callbacks: Iterable[Callback], settings: Mapping[str, Any]
    ) -> None:
        """Raise on all ranks if they are told different things. Collective."""
        agreed = {
            "initial_epoch": settings.get("initial_epoch"),
            "dataset_sink_mode": settings.get("dataset_sink_mode"),
            "callbacks": [
                each.agreed() for each in callbacks if isinstance(each, (ResumingCallback, Extra))
            ],
            "epoch": epoch,
            "last_window": self.last_window,
            "resume": self._resume,
        }
        check_agreement(_OWNER, agreed, "begins to train a Model")

    @property
    def can_save(self) -> bool:
        """True if all processes have had a batch in this step, so that a state can be saved after it."""
        return self._steps is None or self._steps.passes.is_common

    @property
    def data_position(self) -> DataPosition | None:
        """The position of this training in its data, or that of a loaded state; None without either."""
        if self._steps is None:
            return self.resumed_position
        return self._steps.position()

    def _check_network_mode(self, network: nn.Cell, is_train: bool) -> nn.Cell:
        if not is_train:
            # For data sink mode, the step was compiled as part of a larger graph, and its settings have remained.
            forget_accumulation()
            # An evaluation has set another network, which has the same backbone.
            self._backbone_is_train |= network.training
        return super()._check_network_mode(network, is_train)

    def _eval_during_train(
        self, valid_infos: object, cb_params: InternalCallbackParam, list_callback: CallbackManager
    ) -> None:
        # MindSpore calls this at the end of each pass, even if there is nothing to evaluate.
        if self._steps is not None:
            self._steps.end_epoch(cb_params, list_callback)
        super()._eval_during_train(valid_infos, cb_params, list_callback)
