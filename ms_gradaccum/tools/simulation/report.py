"""The results of a simulation, as a table, a plot and a dict."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from ms_gradaccum.backend.plain_state import Json
from ms_gradaccum.parallel.layout import Message, Traffic
from ms_gradaccum.tools.probing.memory import as_text
from ms_gradaccum.tools.reporting.figures import new_figure


class SentMessages(TypedDict):
    """Messages of one kind, as a process of the job has counted them."""

    operator: str
    purpose: str
    # 0: all devices.
    size: int
    ranks: list[int] | None
    count: int
    bytes: int


class HeldBytes(TypedDict, total=False):
    """The bytes that a device holds, by kind; unknown for MindSpore's own cell."""

    bytes: dict[str, int]


class FoundProgram(HeldBytes):
    """Report of a process of the job on a program."""

    messages: list[SentMessages]
    seconds: float
    peak: int


class FoundTraining(TypedDict):
    """Report of a process of the job on a training."""

    losses: list[float]
    whole_losses: list[float]
    updated: list[bool]
    difference: float
    moved: float
    farthest: str


@dataclass(frozen=True)
class MessageKind:
    """The messages of an update that have the same operator, purpose and group.

    Attributes:
        operator: Their class in ``mindspore.ops``.
        purpose: What the compiler put them there for: ``"gradients"``, ``"weights"``, ``"norm"``, ``"forward of a
            sharded operator"``, ``"backward of a sharded operator"``, ``"another layout, forward"``, ``"another layout,
            backward"``, or ``"something else"`` for one whose name does not say it.
        size: Number of ranks in a group.
        ranks: The group that rank 0 is in. None if the program does not say it.
        count: Number of these messages.
        nbytes: What each rank hands in, added up over these messages. Unit: bytes.
    """

    operator: str
    purpose: str
    size: int
    ranks: tuple[int, ...] | None
    count: int
    nbytes: int


@dataclass(frozen=True)
class Program:
    """The compiled step of one device.

    Attributes:
        messages: The messages of one update, those with the most bytes first.
        held_bytes: What the device holds from one update to the next, by kind: ``"parameters"``, ``"optimizer state"``
            and ``"buffer"``, in which the gradients of a window add up. Empty for MindSpore's own cell. Unit: bytes.
        compile_seconds: Time of the compilation in one process, beside all others that compile. With `run` these are
            as many as there are devices, without it two.
        compile_bytes: The most memory that this process has had until then. Unit: bytes.
    """

    messages: tuple[MessageKind, ...]
    held_bytes: dict[str, int]
    compile_seconds: float
    compile_bytes: int

    @staticmethod
    def of(found: FoundProgram, devices: int) -> "Program":
        """Return what a process has found."""
        totals: dict[tuple[Any, ...], list[int]] = {}
        for sent in found["messages"]:
            size = sent["size"] or devices
            # MindSpore's cell is compiled for rank 1, whose groups are those of rank 0 with all ranks moved on.
            ranks = tuple(rank - sent["ranks"][0] for rank in sent["ranks"]) if sent["ranks"] else None
            ranks = tuple(range(devices)) if size == devices else ranks
            total = totals.setdefault((sent["operator"], sent["purpose"], size, ranks), [0, 0])
            total[0] += sent["count"]
            total[1] += sent["count"] * sent["bytes"]
        kinds = [MessageKind(*kind, *total) for kind, total in totals.items()]
        kinds.sort(key=lambda kind: -kind.nbytes)
        return Program(tuple(kinds), found.get("bytes", {}), found["seconds"], found["peak"])

    @property
    def traffic(self) -> Traffic:
        """The messages as the `traffic` of a `TrainingPlan` has them: all in the update, in no order.

        Each has the mean size of its kind.
        """
        return Traffic(
            per_update=tuple(
                Message(kind.operator, kind.size, kind.nbytes // kind.count)
                for kind in self.messages
                for _ in range(kind.count)
            )
        )


@dataclass(frozen=True)
class Training:
    """How the partitioned programs train, beside one process that trains on the whole batch.

    Attributes:
        losses: The loss of each update.
        whole_losses: The same of one process. None for an update that was skipped for a gradient that is not finite.
        difference: The largest difference between an entry of a weight, on any rank, and the same entry of one
            process, after the last update.
        moved: The largest difference between an entry of a weight before and after the training.
        farthest: The name of the weight with the largest `difference`.
    """

    losses: tuple[float, ...]
    whole_losses: tuple[float | None, ...]
    difference: float
    moved: float
    farthest: str

    @staticmethod
    def of(runs: list[FoundTraining]) -> "Training":
        """Return what the ranks have found, first that of rank 0."""
        whole = iter(runs[0]["whole_losses"])
        worst = max(runs, key=lambda run: run["difference"])
        return Training(
            losses=tuple(runs[0]["losses"]),
            whole_losses=tuple(next(whole) if updated else None for updated in runs[0]["updated"]),
            difference=worst["difference"],
            moved=max(run["moved"] for run in runs),
            farthest=worst["farthest"],
        )


@dataclass(frozen=True)
class Simulation:
    """The results of :func:`simulate`. ``print`` shows them as a table.

    Attributes:
        devices (int): Number of devices.
        target (str): Their kind.
        ours (Program): The program of one device: what it sends and holds, and what compiling it takes.
        stock (Program, optional): That of MindSpore's own cell for the same network. None if it could not be compiled,
            or with ``compare=False``.
        stock_error (str, optional): Why it could not be compiled. None if it could, or with ``compare=False``.
        training (Training, optional): How the programs train. None without `run`.
    """

    devices: int
    target: str
    ours: Program
    stock: Program | None
    stock_error: str | None
    training: Training | None

    def to_dict(self) -> dict[str, Json]:
        """Return all of it as dicts, lists, numbers and texts, as JSON holds them."""
        return asdict(self)

    def plot(self, path: str | Path) -> None:
        """Draw what an update sends and what a device holds, by kind, into a PNG. Takes matplotlib."""
        keys = self._keys()
        figure = new_figure(10, 3 + 0.4 * len(keys))
        sent, held = figure.subplots(2, 1, height_ratios=[len(keys), 3])
        programs = {"ms_gradaccum": self.ours} | ({} if self.stock is None else {"MindSpore": self.stock})
        thickness = 0.8 / len(programs)
        for number, (name, program) in enumerate(programs.items()):
            nbytes = {_key(kind): kind.nbytes for kind in program.messages}
            places = [place + number * thickness for place in range(len(keys))]
            sent.barh(places, [nbytes.get(key, 0) for key in keys], thickness, label=name)
        middles = [place + (0.8 - thickness) / 2 for place in range(len(keys))]
        sent.set_yticks(middles, [f"{_label(key)}, ranks {_group(key)}" for key in keys])
        sent.invert_yaxis()
        sent.set(xscale="log", xlim=(1, None), xlabel="bytes that a rank passes to messages, per update (log)")
        sent.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        held.barh(list(self.ours.held_bytes), [size / 2**20 for size in self.ours.held_bytes.values()])
        held.set_xlabel("held by a device, MiB")
        figure.savefig(path, format="png")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _keys(self) -> list[tuple[Any, ...]]:
        """Return the kinds of messages that either program has."""
        kinds = (*self.ours.messages, *(self.stock.messages if self.stock else ()))
        return list(dict.fromkeys(map(_key, kinds)))

    def _lines(self) -> Iterator[str]:
        yield f"One of {self.devices} {self.target} devices, per update:"
        rows = [(_label(key), _group(key), *_cells(key, self.ours), *_cells(key, self.stock)) for key in self._keys()]
        yield from _table([("", "ranks", "count", "bytes", *(("MindSpore's", "bytes") if self.stock else ())), *rows])
        held = ", ".join(f"{kind} {as_text(size)}" for kind, size in self.ours.held_bytes.items())
        yield f"Held by each device: {held}."
        yield f"Compiled here in {_compilation(self.ours)}" + (
            f"; MindSpore's own cell in {_compilation(self.stock)}." if self.stock else "."
        )
        if self.stock_error is not None:
            yield f"MindSpore's own cell could not be compiled: {self.stock_error}"
        if self.training is not None:
            yield from _training_lines(self.training)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Return lines with columns of equal width: two of words, the others of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for words, numbers in ((row[:2], row[2:]) for row in rows):
        cells = [*map(str.ljust, words, widths), *map(str.rjust, numbers, widths[2:])]
        yield "  ".join(["", *cells]).rstrip()


def _training_lines(training: Training) -> Iterator[str]:
    yield f"Losses on {len(training.losses)} updates: {_numbers(training.losses)}; one process: " + _numbers(
        training.whole_losses
    )
    yield (
        f"Weights: at most {training.difference:.1e} from those of one process with the whole batch "
        f"({training.farthest}), where training moved them by up to {training.moved:.1e}."
    )


def _numbers(values: Any) -> str:
    return ", ".join("skipped" if value is None else f"{value:.6g}" for value in values)


def _compilation(program: Program) -> str:
    return f"{program.compile_seconds:.1f} s, {as_text(program.compile_bytes)} at most"


def _key(kind: MessageKind) -> tuple[Any, ...]:
    return kind.operator, kind.purpose, kind.size, kind.ranks


def _label(key: tuple[Any, ...]) -> str:
    return f"{key[0]}, {key[1]}"


def _group(key: tuple[Any, ...]) -> str:
    _, _, size, ranks = key
    return str(size) if ranks is None or len(ranks) > 8 else f"{size}: {' '.join(map(str, ranks))}"


def _cells(key: tuple[Any, ...], program: Program | None) -> tuple[str, ...]:
    if program is None:
        return ()
    found = next((kind for kind in program.messages if _key(kind) == key), None)
    return ("-", "-") if found is None else (str(found.count), str(found.nbytes))
