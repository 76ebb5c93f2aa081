"""Comparison of a window with the whole batch, and of a window op by op with the compiled window."""

import os
import time
from dataclasses import replace

import mindspore as ms
from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import check_cell, check_float, check_int, first_line
from ms_gradaccum.backend.compiled import check_compile, execution_mode
from ms_gradaccum.backend.tolerances import TOLERANCES
from ms_gradaccum.backend.training_cells import DROPOUTS
from ms_gradaccum.batch.arguments import Batch, as_call
from ms_gradaccum.batch.split import BatchAxis, check_batch_axis
from ms_gradaccum.tools.verification.causes import causes_of
from ms_gradaccum.tools.verification.experiment import Experiment, Start
from ms_gradaccum.tools.verification.report import CompileReport, VerifyReport, differences
from ms_gradaccum.tools.whole_batch import Run, largest_difference
from ms_gradaccum.training.grad_accumulation import (
    GradAccumulation,
    Weighted,
    adopted,
    check_weighted,
)

_OWNER = "verify"
_DIFFERS = (
    "A graph keeps what Python decided in construct when it was compiled (counters, time, draws of "
    "random and NumPy), does not call HookBackward, and does not change a tensor under its other "
    "names (o *= 2). Write this with operators of MindSpore, or leave compile out."
)
_RANDOM = (
    "A random operator that is no Dropout layer, or something else that Python reads and that "
    "differs from run to run: two runs op by op from one start differ, so nothing can be compared. "
    "Turn it off."
)
_UNKNOWN = (
    "No cause was found. It may be a bprop or a hook that looks at several rows, random numbers, "
    "or rounding. Give rtol if the difference is small."
)


def verify(
    network: nn.Cell,
    batch: Batch,
    micro_size: int | None,
    *,
    weighted: Weighted = False,
    batch_axis: BatchAxis = 0,
    reference: nn.Cell | None = None,
    rtol: float | None = None,
    compile: bool | None = None,
) -> VerifyReport:
    """Run a batch as one window and in one piece from the same start, and report differences and their causes.

    .. code-block:: python

        window = sum(grad(loss_sum(rows)) for rows in split(batch, micro_size)) / weight
        whole = grad(mean_loss(batch))
        differs = norm(window - whole) > rtol * max(norm(window), norm(whole), 0.01 * norm of all parameters)

    It compares the gradients that the optimizer of a :class:`TrainOneStepCell` gets, and the parameters that forward
    passes change (moving averages). It names Dropout, BatchNorm and state of the network, and measures the loss as a
    training does.
    Both run in MindSpore's current mode and in training mode; cells that are frozen in a training `network` stay so.
    Afterwards parameters, modes, attributes of cells and random generators (not those of kernels) are restored.

    Args:
        network (Cell): A loss cell, or a :class:`GradAccumulation` around one.
        batch (Union[Tensor, tuple, list, dict]): The whole batch: the inputs of `network` in their order, by name, or
            the only one. It must fit into memory in one piece. Use rows that differ, as in real data.
        micro_size (Union[int, None]): The number of micro batches. For a GradAccumulation ``None`` or its own number.

    Keyword Args:
        weighted (Union[bool, str]), batch_axis (Union[int, None, tuple, dict]): As in :class:`GradAccumulation`; not
            for a `network` that is one. Default: ``False`` and ``0``.
        reference (Union[Cell, None]): The loss cell for the whole batch, if it is not `network`: it has the same
            parameters and inputs and returns the mean loss. Only a reference reveals a loss that is divided by the
            number of micro batches. Default: ``None``.
        rtol (Union[float, None]): Relative difference up to which gradients are equal. ``None`` means 1e-4, and 2e-2
            if the network has 16-bit parameters or computes in mixed precision. Default: ``None``.
        compile (Union[bool, None]): ``True`` also compares the window op by op with the window compiled, without
            dropout, see `compiled` of the report. It cannot detect later changes by your program, which a graph does
            not follow. Default: ``None``.

    Returns:
        :class:`VerifyReport`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `compile` is ``False``, or ``True`` while ``MS_JIT=0`` prevents compilation. If `micro_size`,
            `weighted` or `batch_axis` contradict a GradAccumulation, `network` is a training step or has no trainable
            parameters, or `reference` lacks one of them.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_gradaccum import verify
        >>> network = nn.WithLossCell(nn.Dense(2, 1), nn.MSELoss(reduction="sum"))
        >>> x = np.arange(8, dtype=np.float32).reshape(4, 2)
        >>> report = verify(network, (Tensor(x), Tensor(x[:, :1])), micro_size=2)
        >>> print(report.equal, round(report.parameters[0].norm_ratio, 4))
        False 0.5
        >>> print(report.causes[0])
        The loss of two micro batches together is not the mean of their losses (...): rows interact, ...
    """
    compiles = check_compile(_OWNER, compile)
    if compiles and os.getenv("MS_JIT") == "0":
        raise ValueError(
            f"For '{_OWNER}', the argument 'compile' must be None where MS_JIT=0 has nothing "
            f"compiled, but got True. Unset MS_JIT, or leave compile out."
        )
    grad_accumulation = _wrapped(network, micro_size, weighted, batch_axis)
    _check_reference(reference, grad_accumulation.network)
    if rtol is not None:
        check_float(_OWNER, "rtol", rtol, "None means 1e-4, or 2e-2 for 16 bits.")
    inputs = grad_accumulation.positional(*as_call(_OWNER, batch))
    grad_accumulation.bind(inputs, {})
    start = Start(grad_accumulation.network, reference)
    rtol = rtol or TOLERANCES[ms.float16 if start.is_16_bit else ms.float32].tensors
    try:
        experiment = Experiment(grad_accumulation, inputs, start)
        report = _report(experiment, reference, rtol)
        if compiles:
            report = replace(report, compiled=_compare_compiled(experiment, rtol))
        return report
    finally:
        start.put_back()


def _wrapped(
    network: nn.Cell, micro_size: int | None, weighted: Weighted, batch_axis: BatchAxis
) -> GradAccumulation:
    """Wrap a loss cell in a GradAccumulation; return a GradAccumulation itself, if the settings match."""
    network = check_cell(_OWNER, "network", network, "Give a GradAccumulation or a loss cell.")
    if isinstance(network, AutoParallel):
        network = network.network
    network = adopted(network)
    if isinstance(network, nn.TrainOneStepCell):
        raise ValueError(
            f"For '{_OWNER}', the argument 'network' must be a GradAccumulation or a loss cell, "
            f"but got {type(network).__name__}. Give its network."
        )
    if not network.trainable_params():
        raise ValueError(
            f"For '{_OWNER}', the argument 'network' must be one with trainable parameters, but "
            f"got none. Give the loss cell."
        )
    if not isinstance(network, GradAccumulation):
        count = check_int(
            _OWNER, "micro_size", micro_size, "It counts the micro batches of one batch."
        )
        return GradAccumulation(network, count, weighted=weighted, batch_axis=batch_axis)
    remedy = "Settings of a GradAccumulation are its own: leave them out here."
    if micro_size is not None:
        check_int(_OWNER, "micro_size", micro_size, remedy)
    given: dict[str, tuple[object, object]] = {
        "micro_size": (micro_size, None),
        "weighted": (check_weighted(_OWNER, weighted, remedy), False),
        "batch_axis": (check_batch_axis(batch_axis), 0),
    }
    for name, (value, default) in given.items():
        own = getattr(network, name)
        if value not in (own, default):
            raise ValueError(
                f"For '{_OWNER}', the argument '{name}' must be {default!r} or that of the "
                f"GradAccumulation, {own!r}, but got {value!r}. {remedy}"
            )
    return network


def _check_reference(reference: nn.Cell | None, loss_cell: nn.Cell) -> None:
    if reference is None:
        return
    check_cell(_OWNER, "reference", reference, "Give the loss cell of the whole batch.")
    known = {id(parameter) for parameter in reference.get_parameters()}
    missing = [
        parameter.name for parameter in loss_cell.trainable_params() if id(parameter) not in known
    ]
    if missing:
        raise ValueError(
            f"For '{_OWNER}', the argument 'reference' must be a loss cell of the parameters of "
            f"network, but got one without {len(missing)} of them, first {missing[0]!r}. Build it "
            f"around the same network."
        )


def _report(experiment: Experiment, reference: nn.Cell | None, rtol: float) -> VerifyReport:
    """Run window and whole batch, compare them, and name causes if they differ."""
    window = experiment.window()
    whole = experiment.whole()
    other = None
    expected = whole
    if reference is not None:
        other = experiment.whole(reference)
        expected = other._replace(state=whole.state)
    entries = differences(experiment, window, expected, rtol)
    causes: tuple[str, ...] = ()
    is_equal = not any(entry.differs for entry in entries)
    if not is_equal:
        moved = [entry.name for entry in entries if entry.differs and entry.kind == "state"]
        causes = tuple(causes_of(experiment, window, whole, other, moved, rtol)) or (_UNKNOWN,)
    return VerifyReport(
        equal=is_equal,
        parameters=tuple(entries),
        window_loss=window.losses[0],
        whole_loss=expected.losses[0],
        micro_batches=experiment.rows,
        rtol=rtol,
        causes=causes,
    )


def _compare_compiled(experiment: Experiment, rtol: float) -> CompileReport:
    """Compare the window op by op and compiled, without dropout, because its masks cannot be repeated."""
    eager = replace(experiment, frozen=DROPOUTS)
    how = "run op by op"
    try:
        with execution_mode(ms.PYNATIVE_MODE):
            first, again, slow = _run_twice(eager)
            how = "compiled"
            other, _, fast = _run_twice(replace(eager, compiles=True))
    except Exception as error:
        return CompileReport(False, causes=(f"The network cannot be {how}: {first_line(error)}",))
    speedup = slow / fast
    cause = ""
    if not first.is_finite:
        cause = "An Inf or NaN in the run op by op: nothing can be compared."
    elif largest_difference(first, again) > rtol:
        cause = _RANDOM
    if cause:
        return CompileReport(False, causes=(cause,), speedup=speedup)
    entries = differences(eager, other, first, rtol)
    is_equal = largest_difference(first, other) <= rtol and not any(
        entry.differs for entry in entries
    )
    return CompileReport(
        equal=is_equal,
        parameters=tuple(entries),
        eager_loss=first.losses[0],
        compiled_loss=other.losses[0],
        causes=() if is_equal else (_DIFFERS,),
        speedup=speedup,
    )


def _run_twice(experiment: Experiment) -> tuple[Run, Run, float]:
    """Run the window twice from the start. Return both runs and the time of the second, since the first may compile."""
    experiment.start.put_back()
    first = experiment.window()
    experiment.start.put_back()
    begin = time.perf_counter()
    return first, experiment.window(), time.perf_counter() - begin
