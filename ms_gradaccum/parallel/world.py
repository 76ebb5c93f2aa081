"""The processes of a job: rank and size, agreement, exchange of values, and errors that end a rank."""

import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from ms_gradaccum._checks import first_line
from ms_gradaccum.backend.arrays import Array, few_elements
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.parallel.kinds import World

# Types of errors that are raised alike on all ranks. Any other becomes a RuntimeError on the other ranks.
_ERRORS = {kind.__name__: kind for kind in (OSError, ValueError, RuntimeError)}
_MARK = 0x6D736761  # The first word of each exchange. Gradients have another one.
_LONGEST = 64  # The bytes that say what a rank is doing, in the message that follows a difference.
_UNLIKE = "For 'TrainOneStepCell', the ranks made different calls:"
_ALL = "Make the same calls on all ranks."
_LOG = re.compile(r"worker_\d+\.log")  # The name that msrun gives to the log of a worker.


class RanksDiffer(RuntimeError):
    """Error that all ranks raise at the same time."""


def current_world(owner: str) -> World:
    """Return the rank and the number of processes. Raise if a job of several processes has not called ``init()``."""
    if GlobalComm.INITED:
        return World(get_rank(), get_group_size())
    started = os.getenv("MS_WORKER_NUM", "1")
    if os.getenv("MS_ROLE") == "MS_WORKER" and int(started) > 1:
        raise RuntimeError(
            f"For '{owner}', the {started} processes of this job must be connected before they "
            f"train, but init() was not called. Call mindspore.communication.init() first."
        )
    return World(0, 1)


class _Collective(nn.Cell):
    """A collective operator as a graph of its own."""

    def __init__(self, broadcasts: bool) -> None:
        super().__init__()
        self.broadcasts = broadcasts
        self.operator = ops.Broadcast(0) if broadcasts else ops.AllGather()

    def construct(self, values: Tensor) -> Tensor:
        return self.operator((values,))[0] if self.broadcasts else self.operator(values)


def gather_values(doing: str, value: object) -> list[Any]:
    """Return each rank's ``value``, which JSON can represent, in the order of the ranks. Collective."""
    data = json.dumps(value).encode()
    data = data.ljust(1 << len(data).bit_length())  # Few lengths, since each needs its own graph.
    lengths = gather_counts(doing, len(data))
    return [json.loads(each) for each in _gather_bytes(data, lengths)]


def exchange(doing: str, make: Callable[[], object]) -> list[Any]:
    """Call ``make`` on each rank and return all results, as JSON. If one rank fails, raise on all. Collective."""
    try:
        made = make()
    except Exception as error:
        kind = next(
            (name for name, each in _ERRORS.items() if isinstance(error, each)), "RuntimeError"
        )
        gather_values(doing, [None, kind, f"{error}"])
        raise
    everyone = gather_values(doing, [made, None, ""])
    for rank, (_, kind, text) in enumerate(everyone):
        if kind is not None:
            raise _ERRORS[kind](f"{text} (rank {rank})")
    return [each[0] for each in everyone]


def _gather_bytes(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Return each rank's ``data``, of these lengths, in the order of the ranks. Collective, one message."""
    rows = _send(_as_words(data.ljust(max(lengths) or 1))).reshape(len(lengths), -1)
    return [row.tobytes()[:length] for row, length in zip(rows, lengths)]


def _as_words(data: bytes) -> Array:
    """Return padded bytes as int32, which every backend's collectives send exactly."""
    return np.frombuffer(data.ljust(-(-len(data) // 4) * 4), np.int32)


def gather_counts(doing: str, count: int) -> list[int]:
    """Return each rank's ``count``, in the order of the ranks. Collective, one message."""
    return [int(value) for value in _gather_pairs(doing, count)[:, 0]]


def _gather_pairs(doing: str, first: int, second: int = 0) -> Array:
    """Return the two numbers of each rank, in the order of the ranks. Collective, one message.

    Every exchange of the host begins with this message. It says what the rank is ``doing``, so that all ranks raise the
    same error if one of them is doing something else.
    """
    kind = zlib.crc32(doing.encode()) >> 1
    received = _send(np.array([_MARK, kind, first, second], np.int32)).reshape(-1, 4)
    if any(received[:, 0] != _MARK):
        # Nobody else knows of it, so that no further message can say what the others do.
        raise RanksDiffer(f"{_UNLIKE} this rank {doing} and another one adds up gradients. {_ALL}")
    if any(received[:, 1] != kind):
        texts = [
            each.decode().strip()
            for each in _gather_bytes(doing.encode(), [_LONGEST] * len(received))
        ]
        rank = unlike_first(texts)[0]
        raise RanksDiffer(f"{_UNLIKE} rank 0 {texts[0]} and rank {rank} {texts[rank]}. {_ALL}")
    return received[:, 2:]


def _send(words: Array, broadcasts: bool = False) -> Array:
    """Return the int32 ``words`` of all ranks or, with ``broadcasts``, of rank 0."""
    if not GlobalComm.INITED or get_group_size() == 1:
        return words
    received: Array = _collective(broadcasts)(Tensor(words)).asnumpy()
    return received


@cache
def _collective(broadcasts: bool) -> Compiled:
    return Compiled(
        lambda: _Collective(broadcasts), "TrainOneStepCell", "a message", needs_fixed=True
    )


def unlike_first(values: Sequence[object]) -> list[int]:
    """Return the ranks whose value is not that of rank 0. Texts are compared: a NaN is not equal to itself."""
    return [rank for rank, value in enumerate(values) if repr(value) != repr(values[0])]


def check_agreement(
    owner: str, settings: dict[str, object], doing: str = "builds a training step"
) -> None:
    """Raise on every rank if the ranks have different settings, instead of hanging in a collective later."""
    hashes = gather_values(doing, hashlib.sha256(json.dumps(settings).encode()).hexdigest())
    if not unlike_first(hashes):
        return
    everyone = gather_values(doing, settings)
    for name in dict.fromkeys(chain(*everyone)):
        values = [theirs.get(name) for theirs in everyone]
        others = unlike_first(values)
        if others:
            raise ValueError(
                f"For '{owner}', the ranks must agree about '{name}', but got {values[0]} on rank "
                f"0 and {values[others[0]]} on rank {others[0]}. Start all ranks with the same "
                f"settings."
            )


def digest(tensors: Iterable[Tensor], sampled: bool = False) -> str:
    """Return a hash of ``tensors``: of names, types, shapes and values, or of a few elements if ``sampled``."""
    total = hashlib.sha256()
    for each in tensors:
        total.update(f"{getattr(each, 'name', '')}{each.dtype}{each.shape}".encode())
        total.update((few_elements(each) if sampled else each.asnumpy()).tobytes())
    return total.hexdigest()


def differing_ranks(tensors: Iterable[Tensor]) -> list[int]:
    """Return the ranks whose values differ from rank 0 in any bit. Collective."""
    return unlike_first(gather_values("compares parameters", digest(tensors)))


def broadcast_parameters(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the values that parameters and buffers have on rank 0. Collective."""
    for each in tensors:
        values = each.asnumpy()
        received = _send(_as_words(values.tobytes()), broadcasts=True).tobytes()[: values.nbytes]
        assign_in_place(each, Tensor(np.frombuffer(received, values.dtype).reshape(values.shape)))


def gather_rows(arrays: list[Array]) -> tuple[int, int, list[Array]]:
    """Return the place of this rank's first row among all rows, their number, and the gathered arrays."""
    # A rank without rows gives no arrays and gets none. Collective, in two messages: first each rank's numbers of rows
    # and of bytes per row, then the rows, each with its part of all arrays.
    kind = np.dtype([("", array.dtype, array.shape[1:]) for array in arrays])
    names = kind.names or ()
    rows = np.empty(len(arrays[0]) if arrays else 0, kind)
    for name, array in zip(names, arrays):
        rows[name] = array
    counts, widths = _gather_pairs("begins a batch of a GradCacheLoss", len(rows), kind.itemsize).T
    if len(set(widths[counts > 0])) > 1:
        raise ValueError(
            f"For 'GradCacheLoss', a row of outputs and labels must have the same number of bytes "
            f"on all ranks, but got {', '.join(map(str, widths))}. Pad their other axes to one "
            f"length."
        )
    received = b"".join(_gather_bytes(rows.tobytes(), counts.astype(np.int64) * widths))
    whole = [np.ascontiguousarray(np.frombuffer(received, kind)[name]) for name in names]
    return int(counts[: get_rank()].sum()), int(counts.sum()), whole


@cache
def tell_peers(owner: str, world: World) -> None:
    """Make an error that ends this process appear in the msrun logs of the other ranks."""
    before = sys.excepthook
    own = Path(os.path.realpath("/proc/self/fd/2"))
    if not _LOG.fullmatch(own.name):
        return
    import fcntl  # Missing on Windows, which has no such log.

    # msrun opens the logs without this flag, so this rank's next lines would overwrite lines that other ranks append.
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        if not issubclass(kind, Exception):
            return
        for log in set(own.parent.glob("worker_*.log")) - {own}:
            with suppress(OSError), log.open("a") as file:
                file.write(
                    f"\nFor '{owner}', rank {world.rank} has ended with {kind.__name__}: "
                    f"{first_line(error)} See the end of {own}; the lines below are consequences "
                    f"of the lost connection.\n"
                )

    sys.excepthook = hook
