"""Facts about a machine for a bug report."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import mindspore as ms
import psutil

from ms_gradaccum._checks import first_line
from ms_gradaccum.backend.device import REMEDY, VARIABLE, are_slow, cores, is_host, this_device
from ms_gradaccum.backend.probes import multiply
from ms_gradaccum.tools.processes import find_msrun

_PACKAGES = "ms_gradaccum mindspore numpy tqdm matplotlib".split()
_VARIABLES = (
    "DEVICE_ID MS_ROLE MS_WORKER_NUM MS_SCHED_HOST MS_JIT OMP_NUM_THREADS OMP_WAIT_POLICY".split()
)


def describe() -> dict[str, str]:
    """Return the facts that ``python -m ms_gradaccum env`` prints, by name."""
    target = this_device()
    memory = psutil.virtual_memory().total / 2**30
    convolutions = "yes"
    if not is_host():
        convolutions = "not used"
    elif are_slow():
        convolutions = f"no: oneDNN takes its reference code with AVX-512. {REMEDY}"
    facts = {
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: _version_of(name) for name in _PACKAGES},
        "device target": f"{target}, {ms.hal.device_count(target)} of them",
        "cores and memory": f"{cores()} cores, {memory:.1f} GiB",
        "default mode": "PYNATIVE" if ms.get_context("mode") == ms.PYNATIVE_MODE else "GRAPH",
        "float16 products": _tried(ms.float16),
        "bfloat16 products": _tried(ms.bfloat16),
        "fast convolutions on CPU": convolutions,
        "several processes": "yes" if find_msrun() else "no: msrun is not found",
    }
    for name in (*_VARIABLES, VARIABLE):
        if name in os.environ:
            facts[f"${name}"] = os.environ[name]
    return facts


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _tried(dtype: ms.Type) -> str:
    """Return "yes" if the device multiplies in ``dtype``, or "no" with the reason."""
    try:
        multiply(dtype)
    except Exception as error:
        return f"no: {first_line(error)}"
    return "yes"
