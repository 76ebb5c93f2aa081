"""Stand-ins for the CUDA libraries, so that MindSpore's GPU plugin loads on a machine without a GPU.

The plugin is part of the CPU wheel. Its compiler front end, which partitions a graph over devices, needs no device, but
it needs the plugin's linked libraries. One library with functions that always fail stands in for all of them.
"""

import shutil
import subprocess
from pathlib import Path

import mindspore

_PLUGIN = Path(mindspore.__file__).parent / "lib" / "plugin"
_USERS = "libmindspore_gpu.so.11.6 gpu/libcuda_ops.so.11 gpu11.6/libnvidia_collective.so gpu11.6/libnccl.so.2".split()
_LIBRARIES = (
    "libcublas.so.11 libcublasLt.so.11 libcurand.so.10 libcudnn.so.8 libcudart.so.11.0 libcuda.so.1 libcusolver.so.11 "
    "libcufft.so.10 libcusparse.so.11 libnvrtc.so.11.2"
).split()
# The names of files from which MindSpore reads the versions of CUDA and cuDNN.
_OF_VERSIONS = ("libcudart.so.11.6.55", "libcudnn.so.8.9.6")
_NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 11.6, V11.6.55"\n'


def why_not() -> str | None:
    """Return the reason why this machine cannot build the stand-ins, or None."""
    missing = [f"{tool} is not installed" for tool in ("gcc", "nm") if shutil.which(tool) is None]
    missing += [f"this MindSpore has no {user}" for user in _USERS if not (_PLUGIN / user).exists()]
    return missing[0] if missing else None


def stand_ins(folder: Path) -> dict[str, str]:
    """Build a folder that MindSpore accepts as CUDA 11.6, and return the environment variables that lead to it."""
    home = folder / "cuda"
    libraries, library = home / "lib64", home / "stand_ins.so"
    libraries.mkdir(parents=True)
    needed = _needed_functions()
    source, script = home / "stand_ins.c", home / "stand_ins.map"
    names = sorted(set().union(*needed.values()))
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    script.write_text("".join(f"{name} {{ {'; '.join(needed[name])}; }};\n" for name in _LIBRARIES if needed[name]))
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,--version-script={script}", "-o", str(library), str(source)]
    if subprocess.run(command).returncode:
        raise RuntimeError("gcc could not build the stand-ins for CUDA")
    for name in (*_LIBRARIES, *_OF_VERSIONS):
        (libraries / name).symlink_to("../stand_ins.so")
    (home / "bin").mkdir()
    (home / "bin" / "nvcc").write_text(_NVCC)
    (home / "bin" / "nvcc").chmod(0o755)
    found = {"CUDA_HOME": str(home), "LD_LIBRARY_PATH": str(libraries)}
    if "builder" in (Path(mindspore.__file__).parent / "train" / "checkpoint_pb2.py").read_text():
        # For large checkpoints MindSpore selects protobuf's slower Python implementation. Before MindSpore 2.10, its
        # generated code needs that implementation.
        found["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "upb"
    return found


def _needed_functions() -> dict[str, set[str]]:
    """Return the functions that the plugin needs, by library. Those of the driver and a few others have no version."""
    needed: dict[str, set[str]] = {name: set() for name in ("", *_LIBRARIES)}
    for user in _USERS:
        command = ["nm", "-D", "--undefined-only", str(_PLUGIN / user)]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version in needed and (version or name.startswith("cu")):
                needed[version].add(name)
    return needed
