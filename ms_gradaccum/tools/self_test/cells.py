"""The list of what is tried, in groups that share processes."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

_WINDOWS = "ms_gradaccum.tools.self_test.windows"
_COSTS = "ms_gradaccum.tools.self_test.costs"
_PARTITIONED = "ms_gradaccum.tools.self_test.partitioned:semi_auto"
_MODES = ("GRAPH", "PYNATIVE")
_DTYPES = ("float32", "float16", "bfloat16")
_SEVERAL = ("data parallel", "HSDP level1", "HSDP level2")
_CLIPPED: dict[str, Any] = {"network": "MLP", "pairs": True, "clip": True}


@dataclass(frozen=True)
class Cell:
    """One thing that is tried.

    Attributes:
        name: What it is, for the table.
        function: ``module:function``. It is called with a Place, the three attributes that follow and the arguments,
            and returns what it has Found.
        mode: ``"GRAPH"`` or ``"PYNATIVE"``.
        parallel: What several processes do together.
        dtype: What the layers compute in.
        arguments: What else the function is told.
    """

    name: str
    function: str
    mode: str = "GRAPH"
    parallel: str = "one process"
    dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its line in the table, before what was found."""
        kind = "" if self.parallel == "one process" else f"{self.parallel}: "
        return f"{kind}{self.name}, {self.dtype}, {self.mode}"


@dataclass(frozen=True)
class Group:
    """Cells that run one after the other in the same processes.

    Attributes:
        title: Who they are, for the table.
        processes: Number of processes.
        cells: The cells, in their order.
        partitioned: Whether MindSpore's compiler partitions their steps.
    """

    title: str
    processes: int
    cells: tuple[Cell, ...]
    partitioned: bool = False


def groups_for(workers: int) -> list[Group]:
    """Return all that is tried. Some load the state that an earlier group has saved."""
    alone, last = Group("one process", 1, tuple(_alone())), Cell("a window over its bare parts", f"{_COSTS}:ratios")
    if workers == 1:
        return [alone, Group("another process", 1, (last,))]
    several = f"{workers} processes"
    return [
        alone,
        Group(several, workers, tuple(_together())),
        Group(f"{several}, partitioned by the compiler", workers, tuple(_partitioned()), True),
        Group("another process", 1, (last, _window(f"state of {several} resumed", "resume_other"))),
    ]


def _window(
    name: str,
    function: str,
    mode: str = "GRAPH",
    parallel: str = "one process",
    dtype: str = "float32",
    **arguments: Any,
) -> Cell:
    return Cell(name, f"{_WINDOWS}:{function}", mode, parallel, dtype, arguments)


def _alone() -> list[Cell]:
    # First of all: what comes later finds memory that was taken before.
    cells = [Cell("bare parts of a window", f"{_COSTS}:bare_parts")]
    cells += [_window("toy", "toy", mode) for mode in _MODES]
    for name, dtype, mode in product(("MLP", "transformer"), _DTYPES, _MODES):
        cells.append(_window(name, "whole_batch", mode, dtype=dtype, network=name))
    for mode in _MODES:
        cells.append(_window("clip, windows of 2 batches", "whole_batch", mode, **_CLIPPED))
    for dtype, mode in (("float32", "PYNATIVE"), ("float16", "GRAPH")):
        cells.append(_window("loss scale, an overflow", "overflow", mode, dtype=dtype))
    for mode in _MODES:
        cells.append(_window("state saved in mid-window, resumed", "resume", mode))
    cells.append(_window("window in a larger graph", "as_one_graph"))
    cells.append(_window("data sink mode", "data_sink"))
    return cells


def _together() -> list[Cell]:
    cells = [_window("toy", "toy", mode, "data parallel") for mode in _MODES]
    for parallel, mode in product(_SEVERAL, _MODES):
        cells.append(_window("clip, windows of 2 batches", "whole_batch", mode, parallel, **_CLIPPED))
    for mode in _MODES:
        cells.append(_window("transformer", "whole_batch", mode, "data parallel", network="transformer"))
    # Each in one of the modes.
    pairs = (("data parallel", "GRAPH"), ("HSDP level1", "PYNATIVE"))
    for dtype, (parallel, mode) in product(_DTYPES[1:], pairs):
        cells.append(_window("MLP", "whole_batch", mode, parallel, dtype, network="MLP"))
    for parallel, mode in (("data parallel", "GRAPH"), ("HSDP level2", "PYNATIVE")):
        cells.append(_window("loss scale, an overflow on one process", "overflow", mode, parallel))
    cells.append(_window("state saved in mid-window, resumed", "resume", "PYNATIVE", "HSDP level1"))
    cells.append(_window("state of one process resumed", "resume_other", "GRAPH", "HSDP level1"))
    return cells


def _partitioned() -> list[Cell]:
    cells = []
    for sharded, level in product((False, True), ("plain", "level1", "level2", "level3")):
        name = "semi-auto, sharded operators" if sharded else "semi-auto"
        cells.append(
            Cell("MLP", _PARTITIONED, "GRAPH", f"{name}, {level}", arguments={"level": level, "sharded": sharded})
        )
    return cells
