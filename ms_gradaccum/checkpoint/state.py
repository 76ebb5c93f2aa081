"""``save_state`` and ``load_state``: everything that a training needs to continue, written atomically and read back."""

import errno
import json
import os
from collections.abc import Callable, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import (
    DamagedState,
    State,
    all_or_nothing,
    another_program,
    check_int,
    check_saved,
    check_saved_list,
    is_count,
    listed,
    typed,
)
from ms_gradaccum.backend.arrays import Array
from ms_gradaccum.backend.plain_state import Json, assign_in_place
from ms_gradaccum.backend.random_states import (
    checked_random_states,
    put_random_states,
    random_states,
)
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import KEPT, Contents, Held, SavedState, check_arguments
from ms_gradaccum.gradients.norm_limit import NORMS
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import DataPosition
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.kinds import World
from ms_gradaccum.parallel.reducer import shared_by
from ms_gradaccum.parallel.world import current_world, digest, exchange

_SAVE = "save_state"
_LOAD = "load_state"
_SAVES = "saves a state"
_LOADS = "loads a state"


class _Loaded(NamedTuple):
    """The values to assign once all ranks have accepted the state."""

    tensors: list[tuple[Tensor, Array]]  # Parameters and buffers, and their new values.
    random: State
    positions: list[DataPosition]
    extra: dict[str, Json]


def save_state(
    step: TrainOneStepCell | Accumulator | ms.Model,
    directory: str | os.PathLike[str],
    *,
    keep_checkpoint_max: int = 5,
    extra: Mapping[str, Json] | None = None,
) -> SavedState:
    r"""Save everything that a training needs to continue as if it had not stopped, also in the middle of a window.

    This includes all parameters, the averages of an :class:`EMA`, the optimizer's state, the sums of the open window,
    counts, the loss scale, learning rate schedulers, the position in the data, the states of the random number
    generators of Python, NumPy and MindSpore, and `extra`.

    A state is a folder ``state-000001``, ``state-000002``, ... in `directory`. It gets its name once all files are on
    the disk, so a program that is killed at any time leaves the previous state intact. ``mindspore.load_checkpoint``
    reads its safetensors files. All processes of a job must call this function, with a folder that all can access.

    Args:
        step (Union[TrainOneStepCell, Accumulator, Model]): The training step.
        directory (Union[str, PathLike]): Folder of the states of this training. It is created if it is missing.

    Keyword Args:
        keep_checkpoint_max (int): Number of states to keep; older ones are removed once the new one is written.
            Default: ``5``.
        extra (dict, optional): Further JSON values to save; :func:`load_state` returns them. Default: ``None``.

    Returns:
        :class:`SavedState`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `directory` is not a valid path, or `keep_checkpoint_max` is less than 1.
        OSError: If the state cannot be written, for example on a full disk. Earlier states stay intact.
        RuntimeError: If an Accumulator is in the middle of a batch, or the processes' parameters differ.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from mindspore import nn, ops
        >>> from ms_gradaccum import GradAccumulation, TrainOneStepCell, load_state, save_state
        >>> def build():
        ...     network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
        ...     loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), micro_size=2)
        ...     return TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.02), accumulation_steps=2)
        >>> x = ops.arange(1, 9).float().reshape(8, 1)
        >>> train_step = build()
        >>> output = train_step(x[:4], 2 * x[:4])
        >>> folder = tempfile.TemporaryDirectory()
        >>> saved = save_state(train_step, folder.name, extra={"seen": 4})
        >>> train_step = build()
        >>> loaded = load_state(train_step, folder.name)
        >>> output = train_step(x[4:], 2 * x[4:])
        >>> print(loaded.batches, loaded.extra, output.loss, train_step.network.trainable_params()[0].value())
        1 {'seen': 4} 102.0 [[2.04]]
        >>> folder.cleanup()
    """
    trained, folder = check_arguments(_SAVE, step, directory)
    check_int(_SAVE, "keep_checkpoint_max", keep_checkpoint_max, KEPT)
    checked = _checked_extra({} if extra is None else extra)
    contents = Contents(trained)
    positions = _positions_of(step, trained)
    numbers = {
        **contents.state_dict(),
        "random": random_states(),
        "data": [each.state_dict() for each in positions],
    }
    name = _save(contents, folder, numbers, checked)
    if current_world(_SAVE).rank == 0:
        files.keep_last(folder, keep_checkpoint_max)
    return contents.described(folder / name, positions, checked)


def _checked_extra(extra: Mapping[str, Json]) -> dict[str, Json]:
    try:
        checked: dict[str, Json] = json.loads(json.dumps({**extra}))
    except (TypeError, ValueError, RecursionError):
        raise TypeError(
            f"For '{_SAVE}', the argument 'extra' must be a dict of JSON values or None, but got "
            f"{typed(extra)}. Keep numbers, strings, lists and dicts of them."
        ) from None
    return checked


def _positions_of(step: object, trained: TrainOneStepCell | Accumulator) -> list[DataPosition]:
    """Return the positions in the prepared datasets of an Accumulator, or in the dataset of a Model."""
    if isinstance(trained, Accumulator):
        return [dataset.position() for dataset in trained.driver.data.datasets.values()]
    position = getattr(step, "data_position", None)
    if position is None:
        return []
    return [position]


def _save(contents: Contents, directory: Path, numbers: State, extra: dict[str, Json]) -> str:
    """Write a state on all ranks or on none, and return its name."""
    world = current_world(_SAVE)
    claim_folder(_SAVES, directory)
    try:
        own_names = _own_names(contents, world)
        partial = on_rank_0(_SAVES, lambda: files.begin(directory))
        written = exchange(
            _SAVES, lambda: (_write(contents, directory / partial, world.rank, own_names), numbers)
        )
        manifest: State = {
            "versions": {"mindspore": ms.__version__},
            "extra": extra,
            "files": {},
            "ranks": [],
        }
        for of_rank, its_numbers in written:
            manifest["files"] |= of_rank
            manifest["ranks"].append(its_numbers)
        return str(on_rank_0(_SAVES, lambda: files.commit(directory / partial, manifest)))
    except BaseException as error:
        if world.rank == 0:
            files.remove_partial(directory)
        if not isinstance(error, OSError):
            raise
        raise unwritable(directory, error) from error


def on_rank_0(doing: str, function: Callable[[], object]) -> Any:
    """Call a function on rank 0, and return its result on all ranks. Collective."""
    rank = current_world(_SAVE).rank
    return exchange(doing, lambda: function() if rank == 0 else None)[0]


def unwritable(directory: Path, error: OSError) -> OSError:
    """Return the error for a folder in which no state can be written."""
    text = (
        f"For '{_SAVE}', the state cannot be written to {directory}: {error.strerror or error}. "
        f"Earlier states are intact. Make room, or give a folder that all processes can write to."
    )
    return OSError(error.errno or errno.EIO, text)


def claim_folder(doing: str, directory: Path) -> None:
    """Let no other job save into a folder. Collective."""
    try:
        on_rank_0(doing, lambda: files.claim(directory))
    except OSError as error:
        raise unwritable(directory, error) from error


def _own_names(contents: Contents, world: World) -> set[str]:
    """Return the names of the tensors that each rank writes. Raise if a parameter differs that ranks share."""
    held = contents.held
    if contents.is_partitioned:
        return set(held)
    whole = [name for name, each in held.items() if not each.gather]
    sums = {name for name in whole if held[name].window is not None}
    if world.size == 1:
        return sums
    compared = [name for name in whole if name not in sums]
    digests = exchange(_SAVES, lambda: [digest([held[name].source]) for name in compared])
    differing: set[str] = set()
    for others in digests:
        differing |= {
            name for name, own, other in zip(compared, digests[0], others) if own != other
        }
    shared = set(map(id, shared_by(contents.reducers)))
    for name in sorted(differing):
        if id(held[name].source) in shared:
            raise RuntimeError(
                f"For '{_SAVE}', the processes must have the same parameters, but got different "
                f"values of {name!r}. Look for code that changes parameters outside the optimizer, "
                f"or load the last state."
            )
    return differing | sums


def _write(contents: Contents, partial: Path, rank: int, own_names: set[str]) -> files.Files:
    """Write this rank's own tensors, and on rank 0 also the tensors that the ranks share."""
    is_open = [window.count.read() > 0 for window in contents.windows]
    own: dict[str, Held] = {}
    shared: dict[str, Held] = {}
    for name, held in contents.held.items():
        if held.window is None or is_open[held.window]:
            if name in own_names:
                own[name] = held
            else:
                shared[name] = held
    rest = iter(shared.items())
    written: files.Files = {}
    try:
        if rank == 0:
            written = files.write_tensors(
                partial, "", ((name, held.value()) for name, held in rest)
            )
    finally:
        # The gathers are collective: all ranks join them, even if rank 0 fails to write.
        for _, held in rest:
            if held.gather:
                held.value()
    return written | files.write_tensors(
        partial, f"rank_{rank}/", ((name, held.value()) for name, held in own.items())
    )


def load_state(
    step: TrainOneStepCell | Accumulator | ms.Model, directory: str | os.PathLike[str]
) -> SavedState:
    r"""Load the state that :func:`save_state` has saved into a training step.

    Build the step as before: with the same network, optimizer and settings. The whole state is checked first; after an
    error the step is unchanged. Nothing in the files is executed.

    With as many processes as before, the training continues bit for bit, except for operators with a random state
    inside a kernel, such as ``nn.Dropout`` on CPU, which MindSpore restarts from their seed. The number of processes
    may change, and data parallelism can be replaced by HSDP: sums of an open window are added up, and sharded datasets
    continue with the remaining samples. A semi-auto-parallel step needs as many processes as before, or MindSpore's
    functions for distributed checkpoints.

    Args:
        step (Union[TrainOneStepCell, Accumulator, Model]): The training step. The prepared datasets of an Accumulator
            continue from their positions, in the order in which they are prepared; a Model's dataset in
            ``train(..., resume=True)``.
        directory (Union[str, PathLike]): Folder of states (the last one is loaded), or the folder of one state.

    Returns:
        :class:`SavedState`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `directory` is no path or has no state, or the state is damaged or of another program.
        RuntimeError: If an Accumulator is in the middle of a batch.

    Supported Platforms:
        ``GPU`` ``CPU``

    Examples:
        See :func:`save_state`.
    """
    trained, folder = check_arguments(_LOAD, step, directory)
    if isinstance(trained, Accumulator) and trained.driver.in_batch:
        text = (
            "the state must be loaded between two batches, but got a call inside accumulate(). "
            "Load it before."
        )
        raise RuntimeError(f"For '{_LOAD}', {text}")
    contents = Contents(trained)
    world = current_world(_LOAD)
    state = Path(on_rank_0(_LOADS, lambda: str(_choose(folder))))
    found: list[_Loaded] = []
    # If any rank refuses a number, all numbers are restored. Tensors are too large for that and are checked first.
    with all_or_nothing(contents):
        exchange(_LOADS, lambda: found.append(_load_numbers(contents, world, state)))
    loaded = found[0]
    for parameter, value in loaded.tensors:
        assign_in_place(parameter, Tensor(value, parameter.dtype))
    if isinstance(trained, Accumulator):
        trained.driver.data.positions = dict(enumerate(loaded.positions))
    elif isinstance(step, ms.Model) and loaded.positions:
        step.resumed_position = loaded.positions[0]
    put_random_states(loaded.random)
    return contents.described(state, loaded.positions, loaded.extra)


def _choose(directory: Path) -> Path:
    state = files.find_state(directory)
    if state is None:
        renamed = files.renamed_states(directory)
        has = repr(renamed[0].name) if renamed else "none"
        raise ValueError(
            f"For '{_LOAD}', the argument 'directory' must be a folder with states, but got "
            f"{directory.absolute()}, which has {has}. Give the folder of save_state(), or the "
            f"folder of one state."
        )
    return state


def _load_numbers(contents: Contents, world: World, state: Path) -> _Loaded:
    """Check everything, then load the numbers. Return the rest, to assign once all ranks have accepted it."""
    try:
        manifest = files.read_manifest(state)
        everyone = manifest["ranks"]
        batches = _batches(contents, everyone, world.size)
        values = _values(contents, world, state, manifest["files"], batches)
        # This rank takes the values of the saving rank with the same number, modulo the number of saving ranks.
        numbers = everyone[world.rank % len(everyone)]
        random = checked_random_states(numbers.get("random"), "the state")
        if world.rank >= len(everyone):
            # With the same random state as another rank, both would draw the same numbers.
            random = random_states()
        data = check_saved(
            numbers, "where in its data it was saved", {"data": lambda data: isinstance(data, list)}
        )
        positions = [
            DataPosition.of_state_dict(position, len(everyone), random) for position in data["data"]
        ]
        # An open window continues on all ranks, even on those that did not save.
        windows = [
            {**its, "batches": max(counts)}
            for its, counts in zip(numbers["windows"], zip(*batches))
        ]
        contents.load_state_dict({**numbers, "windows": windows})
    except DamagedState as error:
        before = [
            each
            for each in files.states_in(state.parent)
            if files.number_of(each) < files.number_of(state)
        ]
        remedy = (
            f"Give the folder of the state before it, {before[-1]}."
            if before
            else ("There is no state before it.")
        )
        text = (
            f"For '{_LOAD}', the state {state} cannot be used: {error}. Nothing was changed. "
            f"{remedy}"
        )
        raise ValueError(text) from None
    return _Loaded(values, random, positions, manifest["extra"])


def _batches(contents: Contents, everyone: list[State], ranks: int) -> list[list[int]]:
    """Return the number of batches in each window of each saving rank."""
    if (contents.has_shards or contents.is_partitioned) and len(everyone) != ranks:
        remedy = (
            "Use as many processes; MindSpore's transform_checkpoints converts the shards of "
            "AutoParallel"
        )
        raise another_program(
            f"has the network's shards of {len(everyone)} processes, not {ranks}. {remedy}"
        )
    batches: list[list[int]] = []
    for numbers in everyone:
        batches.append([])
        for its in check_saved_list(numbers.get("windows"), "windows", len(contents.windows)):
            counts = check_saved(its, "how many batches its windows had", {"batches": is_count})
            batches[-1].append(counts["batches"])
    most = max(map(max, batches)) if contents.windows else 0
    if isinstance(contents.step, TrainOneStepCell):
        limit = contents.step.body.accumulation_steps
        if 0 < most >= limit:
            raise another_program(
                f"has {most} batches in its window, where accumulation_steps is {limit}"
            )
    return batches


def _values(
    contents: Contents, world: World, state: Path, written: files.Files, batches: list[list[int]]
) -> list[tuple[Tensor, Array]]:
    """Return the new value of each parameter. Raise if the tensors do not match the step.

    ``batches`` are those of each window of each saving rank.
    """
    shared = files.read_tensors(state, written, "")
    of_rank = cache(lambda rank: files.read_tensors(state, written, f"rank_{rank}/"))
    own = shared | of_rank(world.rank % len(batches))

    def sums_of(name: str, held: Held, window: int) -> list[Array]:
        """Return the parts of a window's sums, which are added up over the saving ranks."""
        opened = [rank for rank, counts in enumerate(batches) if counts[window] > 0]
        if name in shared:
            opened = opened[:1]
        parts = []
        for rank in opened:
            # Each rank's part goes to one rank, or to all that gather it.
            if held.gather is None and rank % world.size != world.rank:
                continue
            source = shared if name in shared else of_rank(rank)
            if name not in source:
                raise another_program(f"lacks {name}")
            parts.append(source[name])
        return parts

    needed = {name for name, held in contents.held.items() if held.window is None}
    for verb, wrong in (
        ("lacks", needed - own.keys()),
        ("also has", own.keys() - contents.held.keys()),
    ):
        # The norms of a `NormSpike` begin anew, and are left out without one.
        wrong = {name for name in wrong if not name.endswith(NORMS)}
        if wrong:
            raise another_program(f"{verb} {listed(sorted(wrong), 3)}")
    values = []
    for name, held in contents.held.items():
        if held.window is not None:
            parts = sums_of(name, held, held.window)
        else:
            parts = [own[name]] if name in own else []
        for part in parts:
            theirs = f"{Tensor(np.zeros((), part.dtype)).dtype} {part.shape}"
            ours = f"{held.target.dtype} {tuple(held.target.shape)}"
            if theirs != ours:
                raise another_program(f"has {name!r} as {theirs}, where {ours} is wanted")
        if parts:
            values.append((held.target, reduce(np.add, parts)))
        else:
            values.append((held.target, np.zeros(held.target.shape, np.float32)))
    return values
