"""The list of test cells."""

from dataclasses import dataclass, field
from typing import Any

_TRIALS = "ms_gradaccum.tools.self_test.trials"


@dataclass(frozen=True)
class Cell:
    """One test, run in processes of its own.

    Attributes:
        name: Its name in the table.
        function: ``module:function``. It is called with a Place, the three attributes that follow and the arguments,
            and returns a Found.
        mode: ``"GRAPH"`` or ``"PYNATIVE"``.
        parallel: How several processes train together.
        dtype: The dtype in which the layers compute.
        arguments: Further arguments of the function.
    """

    name: str
    function: str
    mode: str = "GRAPH"
    parallel: str = "one process"
    dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its line in the table, before the result."""
        kind = "" if self.parallel == "one process" else f"{self.parallel}: "
        return f"{kind}{self.name}, {self.dtype}, {self.mode}"

    @property
    def partitioned(self) -> bool:
        """True if MindSpore's compiler partitions the step."""
        return self.parallel.startswith("semi-auto")

    def processes(self, workers: int) -> int:
        """Return the number of its processes."""
        return 1 if self.parallel == "one process" else workers


def all_cells() -> list[Cell]:
    """Return all that is tried. One job loads the state that an earlier process has saved."""
    return [
        _cell("toy", "toy", "PYNATIVE"),
        _cell("clip, windows of 2 batches", "clipped"),
        _cell("transformer, mean over tokens", "tokens"),
        _cell("loss scale, an overflow", "overflow", dtype="float16"),
        _cell("MLP", "plain", "PYNATIVE", dtype="bfloat16"),
        _cell("state saved in mid-window, resumed", "resume", "PYNATIVE"),
        _cell("data sink mode, on CPU a larger graph", "one_graph"),
        _cell("clip, windows of 2 batches", "clipped", "GRAPH", "data parallel"),
        _cell("loss scale, an overflow on one process", "overflow", "PYNATIVE", "data parallel", "float16"),
        _cell("state of one process resumed", "resume_other", "PYNATIVE", "HSDP level1"),
        _cell("clip, windows of 2 batches", "clipped", "GRAPH", "HSDP level2"),
        _cell("two layers", "semi_auto", "GRAPH", "semi-auto, sharded operators, level3"),
    ]


def _cell(name: str, function: str, mode: str = "GRAPH", parallel: str = "one process", dtype: str = "float32") -> Cell:
    return Cell(name, f"{_TRIALS}:{function}", mode, parallel, dtype)
