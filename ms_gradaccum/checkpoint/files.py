"""The files of states: safetensors files of tensors, and a ``manifest.json`` with all other values and checksums."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import safetensors
from mindspore.common import np_dtype
from safetensors.numpy import save as to_bytes

from ms_gradaccum._checks import DamagedState, State
from ms_gradaccum.backend.arrays import Array

FORMAT = "ms_gradaccum"
VERSION = 2
MANIFEST = "manifest.json"
# The largest file of several tensors, which a process holds at a time. Unit: bytes.
CHUNK = 256 * 2**20
_STATE = re.compile(r"state-(\d{6,})")
_PARTIAL = ".partial-"
LOCK = ".lock"
# The time that a job which is ending may hold a folder that its successor wants. Unit: seconds.
LINGERS = 60.0
# The open files whose locks tell other jobs that this process saves there, the oldest first.
_claimed: dict[Path, IO[str]] = {}
_MANY_FOLDERS = 100  # A process that saves into more gives up the oldest.
_FILE = re.compile(r"(rank_\d+/)?parameters-\d{5}\.safetensors")
_CHANGED = "has another checksum than when it was written"
_CODES = "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8".split()
_DTYPES = {f"{code[0].upper()}{8 * int(code[1])}": np.dtype(code) for code in _CODES}
_DTYPES |= {"BOOL": np.dtype(bool), "BF16": np.dtype(np_dtype.bfloat16)}
# The size and the checksum of each file of a state, by its name; and arrays by their names.
Files = dict[str, dict[str, int | str]]
Arrays = dict[str, Array]


def states_in(directory: Path) -> list[Path]:
    """Return the complete states in a folder, the oldest first."""
    return sorted(
        (path for path in directory.glob("state-*") if number_of(path) and path.is_dir()),
        key=number_of,
    )


def number_of(state: Path) -> int:
    """Return the number of a state, or 0 for any other folder."""
    match = _STATE.fullmatch(state.name)
    return int(match[1]) if match else 0


def find_state(directory: str | Path) -> Path | None:
    """Return the folder itself if it is a state, with any name, or else the last state in it."""
    folder = Path(directory).absolute()
    if number_of(folder) and folder.is_dir():
        return folder
    states = states_in(folder)
    if states:
        return states[-1]
    return folder if _is_ours(folder / MANIFEST) else None


def renamed_states(directory: str | Path) -> list[Path]:
    """Return the folders inside a folder that hold a state under another name."""
    found = sorted(Path(directory).glob(f"[!.]*/{MANIFEST}"))
    return [each.parent for each in found if not number_of(each.parent) and _is_ours(each)]


def _is_ours(manifest: Path) -> bool:
    """Return whether a file begins like the manifest of a state. Other programs use this file name, too."""
    return (
        manifest.is_file() and f'"format": "{FORMAT}"' in manifest.read_text(errors="replace")[:100]
    )


def begin(directory: Path) -> str:
    """Create the temporary folder into which a new state is written and return its name."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_partial(directory)
    name = f"{_PARTIAL}state-{max(map(number_of, states_in(directory)), default=0) + 1:06d}"
    (directory / name).mkdir()
    return name


def claim(directory: Path) -> None:
    """Let no other process save into a folder as long as this one lives. Raise if another one does."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / LOCK
    if path in _claimed and path.exists():
        return
    file = path.open("a+")
    end = time.monotonic() + LINGERS
    while not _lock(file):
        if time.monotonic() > end:
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            raise RuntimeError(
                f"For 'save_state', {holder} saves into {directory}, too. End that job, or give "
                f"another folder: each would remove the other's states."
            )
        time.sleep(0.1)
    with suppress(OSError):  # The lock holds on a full disk, too.
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    if len(_claimed) == _MANY_FOLDERS:
        _claimed.pop(next(iter(_claimed))).close()
    _claimed[path] = file


def _lock(file: IO[str]) -> bool:
    """Return whether no other process has locked a file. Some systems have no locks."""
    try:
        import fcntl  # Missing on Windows.

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def remove_partial(directory: Path) -> None:
    """Remove the temporary folders of earlier attempts to write or remove a state."""
    for left in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def write_tensors(folder: Path, prefix: str, tensors: Iterable[tuple[str, Array]]) -> Files:
    """Write named arrays into files below ``folder``, whose names begin with ``prefix``."""
    written: Files = {}
    for number, chunk in enumerate(_in_chunks(tensors)):
        name = f"{prefix}parameters-{number:05d}.safetensors"
        data = to_bytes(chunk, metadata={"format": "np"})
        (folder / name).parent.mkdir(exist_ok=True)
        _write(folder / name, data)
        written[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return written


def _in_chunks(tensors: Iterable[tuple[str, Array]]) -> Iterator[Arrays]:
    chunk: Arrays = {}
    size = 0
    for name, value in tensors:
        if chunk and size + value.nbytes > CHUNK:
            yield chunk
            chunk = {}
            size = 0
        chunk[name] = np.asarray(value, order="C")
        size += value.nbytes
    if chunk:
        yield chunk


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def commit(partial: Path, manifest: State) -> str:
    """Write the manifest, then rename the folder to the state's name, atomically. Return the name."""
    text = json.dumps(signed({"format": FORMAT, "version": VERSION, **manifest}), indent=1)
    _write(partial / MANIFEST, text.encode())
    for folder in (*(path for path in partial.iterdir() if path.is_dir()), partial):
        _sync(folder)
    state = partial.rename(partial.with_name(partial.name.removeprefix(_PARTIAL)))
    _sync(state.parent)
    return state.name


def signed(manifest: State) -> State:
    """Return a manifest with the checksum of its content."""
    content: State = json.loads(json.dumps(manifest))
    content.pop("sha256", None)
    return {
        **content,
        "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
    }


def _sync(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_last(directory: Path, number: int) -> None:
    """Remove all states but the last ``number``. The next save removes what cannot be removed now."""
    with suppress(OSError):
        for state in states_in(directory)[:-number]:
            # Rename it first, so that a kill during the removal leaves no incomplete state.
            shutil.rmtree(state.rename(directory / f"{_PARTIAL}{state.name}"))


def read_manifest(state: Path) -> State:
    """Return the manifest of a state. Raise if it is damaged."""
    path = state / MANIFEST
    data = _read(path)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedState(f"{path} is not valid JSON") from None
    _check(
        isinstance(found, dict) and found.get("format") == FORMAT,
        path,
        "is not the manifest of a state",
    )
    manifest: State = found
    version, files, ranks, extra = (
        manifest.get(key, ()) for key in ("version", "files", "ranks", "extra")
    )
    _check(version == VERSION, path, f"has the version {version!r}, not {VERSION}")
    _check(manifest.get("sha256") == signed(manifest)["sha256"], path, _CHANGED)
    has_ranks = (
        isinstance(ranks, list) and ranks != [] and all(isinstance(each, dict) for each in ranks)
    )
    is_whole = has_ranks and isinstance(files, dict) and isinstance(extra, dict)
    _check(is_whole, path, "lacks its files, its processes or its extra values")
    for name, facts in files.items():
        kinds = {}
        if isinstance(facts, dict):
            kinds = {key: type(value) for key, value in facts.items()}
        # A valid name cannot lead out of the folder.
        is_known = _FILE.fullmatch(name) is not None and kinds == {"size": int, "sha256": str}
        _check(is_known, path, f"lists the file {name!r} in a way that this version does not write")
    return manifest


def read_tensors(state: Path, files: Files, prefix: str) -> Arrays:
    """Return the arrays, by name, in the files of a state that begin with ``prefix``."""
    arrays: Arrays = {}
    for name in sorted(files):
        if name.startswith(prefix) and name.count("/") == prefix.count("/"):
            arrays |= _read_file(state / name, files[name])
    return arrays


def _read_file(path: Path, facts: dict[str, int | str]) -> Arrays:
    data = b""
    if not path.is_symlink():
        data = _read(path)
    _check(
        len(data) == facts["size"],
        path,
        f"does not have the {facts['size']} bytes that were written",
    )
    _check(hashlib.sha256(data).hexdigest() == facts["sha256"], path, _CHANGED)
    try:
        items = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        return {
            name: np.frombuffer(it["data"], _DTYPES[it["dtype"]]).reshape(it["shape"])
            for name, it in items
        }
    except (KeyError, ValueError, safetensors.SafetensorError):
        raise DamagedState(f"{path} is not a safetensors file of this version") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedState(
            f"{path} cannot be read ({os.strerror(error.errno or errno.EIO)})"
        ) from None


def _check(is_right: bool, path: Path, what: str) -> None:
    if not is_right:
        raise DamagedState(f"{path} {what}")
