"""Simulation of a job of many devices on a machine without them."""

import os
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from ms_gradaccum._checks import argument_error, check_bool, check_positive_float, check_positive_int, require
from ms_gradaccum.batch.nested_inputs import Batch
from ms_gradaccum.loops.model import Model
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import EndedError, Job, RankError, refuse_inside
from ms_gradaccum.tools.simulation.cuda_stubs import stand_ins, why_not
from ms_gradaccum.tools.simulation.report import Simulation, simulation_of
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "simulate"


def simulate(
    build: Callable[[], tuple[TrainOneStepCell | Model, Batch]] | str,
    devices: int = 8,
    *,
    run: bool = False,
    timeout: float = 3600.0,
) -> Simulation:
    """Compile a training step for several GPUs on this machine, and report what each of them sends and holds.

    MindSpore's own compiler partitions the step as in a job of `devices` devices: it inserts the messages and splits
    the parameters, and the report counts both. With `run` the programs of all devices also train for three updates,
    each in a process on the CPU, and the report compares their weights with those of one process and the whole batch.
    This needs Linux, and per device a process of about 0.9 GB plus the memory of the compilation.

    Args:
        build (Union[Callable, str]): A function without arguments, at the top level of a file, or a text such as
            ``"train.py:build"``. It returns the training step, a :class:`TrainOneStepCell` or a :class:`Model` whose
            GradAccumulation is inside ``AutoParallel``, and the batch of all devices together, a tuple or a dict of
            tensors. It must not choose the device, start processes or call ``init()``.
        devices (int): Number of devices. Default: ``8``.

    Keyword Args:
        run (bool): Whether the programs also train, on as many CPU processes and on this batch. Default: ``False``.
        timeout (Union[int, float]): Time limit for the whole simulation. Unit: seconds. Default: ``3600.0``.

    Returns:
        Simulation. ``print`` shows it as a table.

    Raises:
        TypeError, ValueError: If an argument, or something that `build` returns, has a wrong type or value.
        RuntimeError: If this machine lacks gcc, nm or the GPU plugin of MindSpore's wheel, if the step does not
            compile, or has an operator that CPU lacks with `run`, or if the program calls it when it is imported.
        TimeoutError: If it takes longer than `timeout`.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from ms_gradaccum import simulate
        >>> print(simulate("train.py:build", devices=8, run=True))  # doctest: +SKIP
    """
    refuse_inside(_OWNER)
    check_positive_int(_OWNER, "devices", devices, "It is the number of devices of the job.")
    require(devices > 1, _OWNER, "devices", "at least 2", devices, "One device partitions nothing.")
    check_bool(_OWNER, "run", run, "It is a switch.")
    check_positive_float(_OWNER, "timeout", timeout, "It is the time of all of it, in seconds.")
    builder = Builder.of(_OWNER, build)._replace(device=["CPU"])
    if lacking := why_not():
        raise RuntimeError(
            f"For '{_OWNER}', this machine must have gcc, nm and the GPU plugin of MindSpore's wheel, but {lacking}. "
            f"Install gcc and binutils with the system's package manager, and mindspore with pip."
        )
    task = {"builder": builder, "home": os.getcwd(), "updates": 3 if run else 0}
    with Job(devices, f"{__package__}.worker:work", task, stand_ins) as job:
        # Show a line with the current phase, only on a terminal.
        with tqdm(bar_format="{desc} {elapsed}", leave=False, disable=None) as line:
            reports = wait_for_reports(job, timeout, line.set_description_str)
    return simulation_of(devices, reports)


def wait_for_reports(job: Job, timeout: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the reports of all ranks. Raise the error of one, or if a process ends or they take too long."""
    try:
        return job.wait(timeout, tell)
    except RankError as error:
        raise error.here(f"For '{_OWNER}', what 'build' returns must compile and run, but rank {error.rank}") from error
    except EndedError as error:
        who = "all" if error.rank is None else f"that of rank {error.rank} of {job.count}"
        raise RuntimeError(
            f"For '{_OWNER}', the processes must run until all are done, but {who} ended at '{job.phase()}'. "
            "Mostly the system has killed it for want of memory: take fewer devices, or layers, or a machine "
            f"with more of it. The last words of one: {job.last_words() or 'none'}"
        ) from None
    except TimeoutError:
        rule, got = "more than what it takes", f"{timeout:g} s: it was at '{job.phase()}'"
        raise TimeoutError(argument_error(_OWNER, "timeout", rule, got, "Give it more time.")) from None
