"""Facts about a machine for a bug report."""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_gradaccum._checks import first_line
from ms_gradaccum.backend.compiled import execution_mode
from ms_gradaccum.backend.cpu import REMEDY, VARIABLE, are_slow
from ms_gradaccum.backend.device import multiply
from ms_gradaccum.backend.kernels import cores, has_kernels
from ms_gradaccum.training.grad_accumulation import GradAccumulation
from ms_gradaccum.training.train_step import TrainOneStepCell

_PACKAGES = ("ms_gradaccum", "mindspore", "numpy", "tqdm", "matplotlib")
_VARIABLES = "DEVICE_ID MS_ROLE MS_WORKER_NUM MS_SCHED_HOST MS_JIT OMP_NUM_THREADS OMP_WAIT_POLICY".split()


def describe() -> dict[str, str]:
    """Return the facts that ``python -m ms_gradaccum env`` prints, by name. Features are tested on tiny networks."""
    target = ms.get_context("device_target")
    on_cpu = target == "CPU"
    facts = {"python": platform.python_version(), "system": platform.platform()}
    facts.update({name: _version_of(name) for name in _PACKAGES})
    facts["device target"] = f"{target}, {ms.hal.device_count(target)} of them"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts["cores and memory"] = f"{cores()} cores, {memory:.1f} GiB"
    facts["default mode"] = "GRAPH" if ms.get_context("mode") == ms.GRAPH_MODE else "PYNATIVE"
    facts["an update in GRAPH mode"] = _tried(lambda: _update(ms.GRAPH_MODE))
    facts["an update in PYNATIVE mode"] = _tried(lambda: _update(ms.PYNATIVE_MODE))
    facts["float16 products"] = _tried(lambda: multiply(ms.float16))
    facts["bfloat16 products"] = _tried(lambda: multiply(ms.bfloat16))
    facts["data sink mode"] = "no: Model feeds batches one by one on CPU" if on_cpu else "yes, in GRAPH mode"
    facts["kernels for sums on CPU"] = "yes" if has_kernels() else "no"
    slow = f"no: oneDNN takes its reference code with AVX-512. {REMEDY}"
    facts["fast convolutions on CPU"] = "not used" if not on_cpu else slow if are_slow() else "yes"
    facts["several processes"] = _msrun()
    facts["semi-auto-parallel"] = "no: HSDP of this package stands in on CPU" if on_cpu else "yes"
    facts.update({f"${name}": value for name in [*_VARIABLES, VARIABLE] if (value := os.getenv(name)) is not None})
    return facts


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _msrun() -> str:
    found = shutil.which("msrun")
    if found is None:
        return "no: msrun is not found"
    # A path may reveal a user name, so it is shown only if it matters.
    beside = Path(found).parent.samefile(Path(sys.executable).parent)
    return "yes" if beside else f"yes, by another Python's {found}"


def _tried(run: Callable[[], None]) -> str:
    """Return "yes", or "no" with the reason."""
    try:
        run()
    except Exception as error:
        return f"no: {first_line(error)}"
    return "yes"


def _update(mode: int) -> None:
    """Make an update with two micro batches, which moves a weight from 0 to 1."""
    with execution_mode(mode):
        network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
        ones = Tensor(np.ones((4, 1), np.float32))
        TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.5))(ones, ones)
        reached = network.weight.asnumpy().item()
    if abs(reached - 1.0) > 1e-5:
        raise RuntimeError(f"the weight is {reached} where 1.0 is right")
