"""The files of saved states, which are written atomically and checked before use.

A state is a folder with tensors in safetensors files and a ``manifest.json`` with all other values, the sizes and
checksums of these files, and a checksum of its own content. It is written under a temporary name and renamed once all
files are on the disk. Nothing in it is ever executed.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from mindspore.common import np_dtype
from safetensors.numpy import save as to_bytes

from ms_gradaccum._checks import DamagedState, warn

# States of version 1 have no checksum of their manifest.
FORMAT, VERSION, UNSIGNED = "ms_gradaccum", 2, 1
MANIFEST = "manifest.json"
# The size of the tensors that one process holds at a time. Unit: bytes.
CHUNK = 256 * 2**20
# The maximum size of a manifest. Unit: bytes.
MAX_MANIFEST = 256 * 2**20
_STATE, _PARTIAL = re.compile(r"state-(\d{6,})"), ".partial-"
_FILE = re.compile(r"(rank_\d+/)?parameters-\d{5}\.safetensors")
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16"}
_NAMES |= {"I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"}
_DTYPES: dict[str, Any] = {name: np.dtype(numpy_name) for name, numpy_name in _NAMES.items()}
_DTYPES["BF16"] = np.dtype(np_dtype.bfloat16)

Tensors = Iterable[tuple[str, Callable[[], Any]]]


def states_in(directory: Path) -> list[Path]:
    """Return the complete states in a folder, the oldest first."""
    found = [path for path in directory.glob("state-*") if _STATE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=number_of)


def renamed_states(directory: Path) -> list[Path]:
    """Return a folder, or those in it, that are states by their manifest and not by their name."""
    found = [path.parent for pattern in (MANIFEST, f"*/{MANIFEST}") for path in sorted(directory.glob(pattern))]
    return [state for state in found if not state.name.startswith(_PARTIAL) and _is_ours(state / MANIFEST)]


def _is_ours(manifest: Path) -> bool:
    """Return whether a manifest begins as ours do."""
    try:
        with manifest.open("rb") as file:
            return f'"format": "{FORMAT}"'.encode() in file.read(100)
    except OSError:
        return False


def number_of(state: Path) -> int:
    """Return the number of a state, or 0 for any other folder."""
    match = _STATE.fullmatch(state.name)
    return int(match[1]) if match else 0


def next_name(directory: Path) -> str:
    """Return the name of the next state."""
    states = states_in(directory)
    return f"state-{number_of(states[-1]) + 1 if states else 1:06d}"


def partial_of(directory: Path, name: str) -> Path:
    """Return the temporary folder into which a state is written."""
    return directory / f"{_PARTIAL}{name}"


def begin(directory: Path, name: str) -> None:
    """Create the temporary folder of a new state, and remove those of earlier attempts."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left)
    partial_of(directory, name).mkdir()


def write_tensors(folder: Path, prefix: str, tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Write tensors into files below ``folder`` and return the size and checksum of each file by its name."""
    written: dict[str, dict[str, Any]] = {}
    for number, chunk in enumerate(_in_chunks(tensors)):
        name = f"{prefix}parameters-{number:05d}.safetensors"
        data = to_bytes(chunk, metadata={"format": "np"})
        (folder / name).parent.mkdir(exist_ok=True)
        _write(folder / name, data)
        written[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return written


def _in_chunks(tensors: Tensors) -> Iterator[dict[str, Any]]:
    chunk: dict[str, Any] = {}
    size = 0
    for name, value_of in tensors:
        value = np.asarray(value_of(), order="C")
        if chunk and size + value.nbytes > CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = value
        size += value.nbytes
    if chunk:
        yield chunk


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def commit(directory: Path, name: str, manifest: dict[str, Any]) -> Path:
    """Write the manifest and give the state its name, atomically."""
    partial, state = partial_of(directory, name), directory / name
    text = json.dumps(signed({"format": FORMAT, "version": VERSION, **manifest}), indent=1)
    _write(partial / MANIFEST, text.encode())
    for folder in (*(path for path in partial.iterdir() if path.is_dir()), partial):
        _sync(folder)
    partial.rename(state)
    _sync(directory)
    return state


def signed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with the checksum of its content."""
    content: dict[str, Any] = json.loads(json.dumps(manifest))
    content.pop("sha256", None)
    return {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def give_up(directory: Path, name: str) -> None:
    """Remove a state that cannot be finished."""
    shutil.rmtree(partial_of(directory, name), ignore_errors=True)


def keep_last(directory: Path, number: int) -> None:
    """Remove all states but the last ``number``."""
    for state in states_in(directory)[:-number]:
        doomed = partial_of(directory, state.name)
        # It is renamed first, so that a kill in the middle leaves no incomplete state.
        state.rename(doomed)
        shutil.rmtree(doomed)


def read_manifest(state: Path) -> dict[str, Any]:
    """Return the manifest of a state. Raise if it is damaged."""
    path = state / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST:
            raise DamagedState(f"{path} has more than {MAX_MANIFEST} bytes")
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedState(f"{path} cannot be read ({os.strerror(error.errno or errno.EIO)})") from None
    except (ValueError, RecursionError):
        raise DamagedState(f"{path} is no JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DamagedState(f"{path} is no manifest of a state")
    if manifest.get("version") not in (VERSION, UNSIGNED):
        raise DamagedState(f"{path} has the version {manifest.get('version')!r}, not {VERSION}")
    if manifest["version"] == UNSIGNED and "sha256" not in manifest:
        warn(
            f"For 'load_state', {path} should have a checksum, but got one of an older version, without. Save it anew."
        )
    elif manifest.get("sha256") != signed(manifest)["sha256"]:
        raise DamagedState(f"{path} has another checksum than what was written")
    _check_files(path, manifest.get("files"))
    return manifest


def _check_files(path: Path, files: Any) -> None:
    if not isinstance(files, dict):
        raise DamagedState(f"{path} lists no files")
    for name, facts in files.items():
        # Valid names do not lead out of the folder.
        known = _FILE.fullmatch(name) and isinstance(facts, dict) and set(facts) == {"size", "sha256"}
        if not known or not isinstance(facts["size"], int) or not isinstance(facts["sha256"], str):
            raise DamagedState(f"{path} lists the file {name!r} in a way that this version does not write")


def read_tensors(state: Path, files: dict[str, dict[str, Any]], prefix: str) -> dict[str, Any]:
    """Return the arrays, by name, in the files of a state that begin with ``prefix``."""
    found: dict[str, Any] = {}
    for name in sorted(files):
        if name.startswith(prefix) and name.count("/") == prefix.count("/"):
            found |= _read_file(state / name, files[name])
    return found


def _read_file(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    try:
        if path.is_symlink() or path.stat().st_size != facts["size"]:
            raise DamagedState(f"{path} has not the {facts['size']} bytes that were written")
        data = path.read_bytes()
    except OSError as error:
        raise DamagedState(f"{path} cannot be read ({os.strerror(error.errno or errno.EIO)})") from None
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise DamagedState(f"{path} has another checksum than what was written")
    try:
        items = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        return {name: _array(item) for name, item in items}
    except (KeyError, ValueError, safetensors.SafetensorError):
        raise DamagedState(f"{path} is no safetensors file that can be read here") from None


def _array(item: dict[str, Any]) -> Any:
    return np.frombuffer(item["data"], _DTYPES[item["dtype"]]).reshape(item["shape"])
