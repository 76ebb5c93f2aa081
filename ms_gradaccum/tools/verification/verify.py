"""Comparison of a window with the whole batch, and the causes of a difference."""

import os
from dataclasses import replace
from typing import Any

from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import argument_error, check_bool, check_cell, check_positive_float, check_positive_int
from ms_gradaccum.backend.compiled import check_compile
from ms_gradaccum.batch.nested_inputs import Batch, as_call
from ms_gradaccum.batch.split import BatchAxis, check_batch_axis
from ms_gradaccum.gradients.mixed_precision import computes_in_16_bits
from ms_gradaccum.tools.verification.compiled_window import compare_compiled
from ms_gradaccum.tools.verification.experiment import Experiment, Start
from ms_gradaccum.tools.verification.report import VerifyReport, run_and_report
from ms_gradaccum.training.grad_accumulation import GradAccumulation

_OWNER = "verify"
_RTOL, _RTOL_16_BIT = 1e-4, 2e-2


def verify(
    network: nn.Cell,
    batch: Batch,
    micro_size: int | None,
    *,
    weighted: bool = False,
    batch_axis: BatchAxis = 0,
    reference: nn.Cell | None = None,
    rtol: float | None = None,
    compile: bool | None = None,
) -> VerifyReport:
    r"""Run a batch as one window and in one piece from the same start, and report what differs and why.

    .. code-block:: python

        window = sum(grad(loss_sum(rows)) for rows in split(batch, micro_size)) / weight
        whole = grad(mean_loss(batch))
        differs = norm(window - whole) > rtol * max(norm(window), norm(whole), 0.01 * norm of all parameters)

    The window is that of :class:`TrainOneStepCell` up to the optimizer. Compared are the gradients that the optimizer
    gets, and the parameters that the forward passes change (moving averages). Each cause of a difference is confirmed
    by an experiment before it is named: BatchNorm, dropout and other random operators, state, losses that average over
    something else than rows, sums, divisions done twice, and rows that depend on each other.

    Both run compiled in GRAPH mode and op by op in PYNATIVE mode, and in training mode. If `network` is in training
    mode already, cells in it that ``set_train(False)`` has frozen stay frozen.

    With ``compile=True`` the window also runs op by op and compiled from the same start, in either mode and without
    dropout, and the report names the parameters that differ. It cannot see what your program changes later: a graph
    keeps the values of attributes and globals that it was compiled with.

    Afterwards parameters, modes, the random state, and the attributes of cells with the items of their lists and dicts
    are restored, but not the random state inside MindSpore's operators, globals, and the inside of other objects.

    Args:
        network (Cell): A loss cell, or a :class:`GradAccumulation` around one.
        batch (Union[Tensor, tuple, list, dict]): The whole batch: the inputs of `network` in their order, by name, or
            the only one. It must fit into memory in one piece. Rows that differ, as real data do, show most.
        micro_size (Union[int, None]): The number of micro batches. For a GradAccumulation its own number or ``None``.

    Keyword Args:
        weighted (bool): Whether `network` returns `(loss_sum, weight)`, see :class:`GradAccumulation`, whose own
            setting holds if `network` is one. Default: ``False``.
        batch_axis (Union[int, None, tuple, dict]): Axis of the rows, see :class:`GradAccumulation`, whose own
            setting holds if `network` is one. Default: ``0``.
        reference (Union[Cell, None]): The loss cell for the whole batch, if it is not `network`: it has the same
            parameters and inputs and returns the mean loss. Only with it does a division of the loss by the number of
            micro batches show. Default: ``None``.
        rtol (Union[float, None]): Relative difference up to which gradients are equal. ``None`` means 1e-4, and 2e-2
            if the network has 16-bit parameters or computes in mixed precision. Default: ``None``.
        compile (Union[bool, None]): ``True`` also compares the window op by op with the window compiled, see
            `compiled` of the report. Default: ``None``.

    Returns:
        :class:`VerifyReport`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `compile` is ``False``, or ``True`` while ``MS_JIT=0`` has nothing compiled. If `micro_size`,
            `weighted` or `batch_axis` contradict a GradAccumulation, `network` is a training step or has no trainable
            parameters, or `reference` lacks one of them.

    Note:
        A diagnosis runs up to two whole batches more per experiment, and keeps the gradients of the micro
        batches in float32 in host memory. ``compile=True`` runs two windows op by op and two compiled.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

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
        The loss should be a mean over rows, but it adds up its rows, ...
    """
    compiles = _check_compile(compile)
    grad_accumulation = _as_grad_accumulation(network, micro_size, weighted, batch_axis)
    loss_cell = grad_accumulation.network
    _check_reference(reference, loss_cell)
    if rtol is not None:
        check_positive_float(_OWNER, "rtol", rtol, "None means 1e-4, or 2e-2 for 16 bits.")
    args, kwargs = as_call(_OWNER, batch)
    inputs = grad_accumulation.positional(args, kwargs)
    grad_accumulation.bind(inputs, {})
    start = Start(loss_cell, reference)
    rtol = rtol or _default_rtol(start)
    try:
        report = run_and_report(Experiment(grad_accumulation, inputs, reference, start), rtol)
        compiled = compare_compiled(grad_accumulation, inputs, start, rtol) if compiles else None
        return replace(report, compiled=compiled)
    finally:
        start.kept.put_back()


def _as_grad_accumulation(
    network: Any, micro_size: int | None, weighted: bool, batch_axis: BatchAxis
) -> GradAccumulation:
    network = check_cell(_OWNER, "network", network, "Give a GradAccumulation or a loss cell.")
    if isinstance(network, AutoParallel):
        network = network.network
    if isinstance(network, nn.TrainOneStepCell):
        rule = "a GradAccumulation or a loss cell"
        raise ValueError(argument_error(_OWNER, "network", rule, type(network).__name__, "Give its network."))
    if not any(True for _ in network.trainable_params()):
        raise ValueError(
            argument_error(_OWNER, "network", "one with trainable parameters", "none", "Give the loss cell.")
        )
    if not isinstance(network, GradAccumulation):
        count = check_positive_int(_OWNER, "micro_size", micro_size, "It counts the micro batches of one batch.")
        return GradAccumulation(network, count, weighted=weighted, batch_axis=batch_axis)
    remedy = "Settings of a GradAccumulation are its own: leave them out here."
    if micro_size is not None:
        check_positive_int(_OWNER, "micro_size", micro_size, remedy)
    check_bool(_OWNER, "weighted", weighted, remedy)
    axis = check_batch_axis(batch_axis)
    given = (("micro_size", micro_size, None), ("weighted", weighted, False), ("batch_axis", axis, 0))
    for name, value, default in given:
        own = getattr(network, name)
        if value not in (own, default):
            rule = f"{default!r} or that of the GradAccumulation, {own!r}"
            raise ValueError(argument_error(_OWNER, name, rule, repr(value), remedy))
    return network


def _check_compile(value: Any) -> bool:
    compiles = check_compile(_OWNER, value)
    if compiles and os.getenv("MS_JIT") == "0":
        rule, got = "None where MS_JIT=0 has nothing compiled", "True"
        raise ValueError(argument_error(_OWNER, "compile", rule, got, "Unset MS_JIT, or leave compile out."))
    return compiles


def _check_reference(reference: Any, loss_cell: nn.Cell) -> None:
    if reference is None:
        return
    check_cell(_OWNER, "reference", reference, "Give the loss cell of the whole batch.")
    known = {id(parameter) for parameter in reference.get_parameters()}
    missing = [parameter.name for parameter in loss_cell.trainable_params() if id(parameter) not in known]
    if missing:
        got = f"one without {len(missing)} of them, first {missing[0]!r}"
        remedy = "Build it around the same network."
        raise ValueError(argument_error(_OWNER, "reference", "a loss cell of the parameters of network", got, remedy))


def _default_rtol(start: Start) -> float:
    """Return the tolerance for float32, or that for a network of which something computes in 16 bits."""
    return _RTOL_16_BIT if computes_in_16_bits(start.parameters, start.cells) else _RTOL
