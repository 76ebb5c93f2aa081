"""Partitioned programs of several GPUs, compiled and run on a machine without them."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from ms_gradaccum import Model, TrainOneStepCell
from ms_gradaccum.batch.arguments import Batch
from ms_gradaccum.tools.builder import Builder
from ms_gradaccum.tools.processes import Job
from simulation.cuda_stubs import stand_ins
from simulation.report import Simulation, simulation_of
from simulation.worker import work


def simulate(
    build: Callable[[], tuple[TrainOneStepCell | Model, Batch]] | str,
    devices: int = 8,
    *,
    run: bool = False,
    timeout: float = 3600.0,
) -> Simulation:
    """Compile a training step for several GPUs on this machine, and report what each of them sends and holds.

    MindSpore's own compiler partitions the step as in a job of ``devices`` devices. With ``run`` the programs of all
    devices also train for three updates, each in a process on the CPU, and the report compares their weights with those
    of one process and the whole batch. ``build`` returns the step, or a Model, and the batch of all devices together.
    """
    builder = Builder.of("simulate", build)._replace(device=["CPU"])
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, stand_ins(Path(folder))):
        with Job(devices, work, builder, os.getcwd(), 3 if run else 0) as job:
            return simulation_of(devices, job.wait(timeout))
