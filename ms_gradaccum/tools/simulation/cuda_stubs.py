"""Stand-ins for the CUDA libraries, with which MindSpore's GPU plugin loads on a machine without a GPU.

The plugin is part of the CPU wheel. Its compiler front end, which partitions a graph over devices, needs no device, but
the libraries that the plugin is linked with. The stand-ins are libraries whose functions all fail.
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
# The functions of the driver, and a few others, are needed without a version.
_UNVERSIONED = "libcuda.so.1"
_NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 11.6, V11.6.55"\n'


def why_not() -> str | None:
    """Return the reason why this machine cannot build the stand-ins, or None."""
    missing = [f"{tool} is not installed" for tool in ("gcc", "nm") if shutil.which(tool) is None]
    missing += [f"this MindSpore has no {user}" for user in _USERS if not (_PLUGIN / user).exists()]
    return missing[0] if missing else None


def stand_ins(folder: Path) -> dict[str, str]:
    """Build a folder that MindSpore accepts as CUDA 11.6, and return the environment variables that lead to it."""
    home = folder / "cuda"
    libraries, sources = home / "lib64", home / "src"
    libraries.mkdir(parents=True)
    sources.mkdir()  # Not beside the libraries, where MindSpore loads every file.
    compilers = [_build_library(libraries, sources, name, functions) for name, functions in _needed_functions().items()]
    if any(compiler.wait() for compiler in compilers):
        raise RuntimeError("gcc could not build the stand-ins for CUDA")
    # MindSpore reads the versions of CUDA and cuDNN from these file names.
    (libraries / "libcudart.so.11.6.55").symlink_to("libcudart.so.11.0")
    (libraries / "libcudnn.so.8.9.6").symlink_to("libcudnn.so.8")
    (home / "bin").mkdir()
    (home / "bin" / "nvcc").write_text(_NVCC)
    (home / "bin" / "nvcc").chmod(0o755)
    return environment(home)


def environment(cuda_home: Path) -> dict[str, str]:
    """Return the environment variables for the stand-ins, and for a fast protobuf where MindSpore works with it."""
    found = {"CUDA_HOME": str(cuda_home), "LD_LIBRARY_PATH": str(cuda_home / "lib64")}
    if "builder" in (Path(mindspore.__file__).parent / "train" / "checkpoint_pb2.py").read_text():
        # For large checkpoints MindSpore selects protobuf's implementation in Python, which is slower. Before
        # MindSpore 2.10 its generated code needs that implementation.
        found["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "upb"
    return found


def _needed_functions() -> dict[str, set[str]]:
    """Return the functions that the plugin needs of each library."""
    needed: dict[str, set[str]] = {name: set() for name in _LIBRARIES}
    for user in _USERS:
        command = ["nm", "-D", "--undefined-only", str(_PLUGIN / user)]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version in needed:
                needed[version].add(name)
            elif not version and name.startswith("cu"):
                needed[_UNVERSIONED].add(name)
    return needed


def _build_library(folder: Path, sources: Path, name: str, functions: set[str]) -> subprocess.Popen[bytes]:
    source = sources / f"{name}.c"
    source.write_text("".join(f"int {function}(void) {{ return 100; }}\n" for function in sorted(functions)))
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
    if name != _UNVERSIONED:
        script = sources / f"{name}.map"
        script.write_text(f"{name} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    return subprocess.Popen(command)
