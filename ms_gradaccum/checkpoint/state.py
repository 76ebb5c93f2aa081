"""``save_state`` and ``load_state``: everything that a training needs to continue, written atomically and read back."""

import errno
import json
import os
from collections.abc import Mapping
from functools import cache, reduce
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_gradaccum._checks import (
    DamagedState,
    State,
    all_or_nothing,
    another_program,
    argument_error,
    check_positive_int,
    check_saved,
    check_saved_list,
    is_count,
    listed,
    typed,
)
from ms_gradaccum.backend.plain_state import Json, assign_in_place
from ms_gradaccum.backend.snapshot import checked_random_states, put_random_states, random_states
from ms_gradaccum.backend.tensors import Array
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import KEPT, Contents, SavedState, check_arguments
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import DataPosition
from ms_gradaccum.loops.train_step import TrainOneStepCell
from ms_gradaccum.parallel.world import World, current_world, digest, exchange

_SAVE, _LOAD = "save_state", "load_state"
_SAVES, _LOADS = "saves a state", "loads a state"
_Plan = list[tuple[Tensor, Array]]  # Parameters and buffers, and their new values.
# Values to assign once all ranks have accepted the state: tensors, random states, positions in the data, `extra`.
_Found = tuple[_Plan, State, list[DataPosition], dict[str, Json]]


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
        ``Ascend`` ``GPU`` ``CPU``

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
    check_positive_int(_SAVE, "keep_checkpoint_max", keep_checkpoint_max, KEPT)
    try:
        checked: dict[str, Json] = json.loads(json.dumps({} if extra is None else {**extra}))
    except (TypeError, ValueError, RecursionError):
        rule, remedy = "a dict of JSON values or None", "Keep numbers, strings, lists and dicts of them."
        raise TypeError(argument_error(_SAVE, "extra", rule, typed(extra), remedy)) from None
    contents = Contents(trained)
    if isinstance(trained, Accumulator):
        places = [dataset.place() for dataset in trained.datasets.values()]
    else:
        place = getattr(step, "data_place", None)  # A Model has one.
        places = [] if place is None else [place]
    numbers = {**contents.state_dict(), "random": random_states(), "data": [place.as_json() for place in places]}
    name = _save(contents, folder, numbers, checked)
    if current_world(_SAVE).rank == 0:
        files.keep_last(folder, keep_checkpoint_max)
    return contents.described(folder / name, places, checked)


def _save(contents: Contents, directory: Path, numbers: State, extra: dict[str, Json]) -> str:
    """Write a state on all ranks or on none, and return its name."""
    world = current_world(_SAVE)
    claim_folder(_SAVES, directory)
    try:
        partial, own_names = _begin(contents, directory, world)
        written = exchange(_SAVES, lambda: (_write(contents, directory / partial, world.rank, own_names), numbers))
        found = {file: facts for each, _ in written for file, facts in each.items()}
        ranks = [each for _, each in written]
        manifest = {"versions": {"mindspore": ms.__version__}, "extra": extra, "files": found, "ranks": ranks}
        name = exchange(_SAVES, lambda: files.commit(directory / partial, manifest) if world.rank == 0 else "")[0]
        return str(name)
    except BaseException as error:
        if world.rank == 0:
            files.remove_partial(directory)
        if not isinstance(error, OSError):
            raise
        raise unwritable(directory, error) from error


def unwritable(directory: Path, error: OSError) -> OSError:
    """Return the error for a folder in which no state can be written."""
    text = (
        f"For '{_SAVE}', the state cannot be written to {directory}: {error.strerror or error}. The states before "
        f"it are whole. Make room, or give a folder that all processes can write to"
    )
    return OSError(error.errno or errno.EIO, text)


def claim_folder(doing: str, directory: Path) -> None:
    """Let no other job save into a folder. Collective."""
    is_first = current_world(_SAVE).rank == 0
    try:
        exchange(doing, lambda: files.claim(directory) if is_first else None)
    except OSError as error:
        raise unwritable(directory, error) from error


def _begin(contents: Contents, directory: Path, world: World) -> tuple[str, set[str]]:
    """Agree on the temporary folder of the state. Return it with the names of the tensors that each rank writes."""
    held = contents.held
    whole = [name for name, each in held.items() if not each.gather]
    sums = {name for name in whole if held[name].window is not None}
    compared = [] if world.size == 1 or contents.is_partitioned else [name for name in whole if name not in sums]

    def first_words() -> tuple[str, list[str]]:
        partial = files.begin(directory) if world.rank == 0 else ""
        return partial, [digest([held[name].source]) for name in compared]

    words = exchange(_SAVES, first_words)
    digests = zip(*(each for _, each in words))
    differing = {name for name, each in zip(compared, digests) if len(set(each)) > 1}
    shared = {id(parameter) for reducer in contents.reducers for parameter in reducer.shared()}
    differing_ranks = sorted(name for name in differing if id(held[name].source) in shared)
    if differing_ranks:
        raise RuntimeError(
            f"For '{_SAVE}', the processes must have the same parameters, but got different ones of "
            f"{differing_ranks[0]!r}. Look for what changes parameters outside the optimizer, or load the last state."
        )
    return words[0][0], set(held) if contents.is_partitioned else differing | sums


def _write(contents: Contents, partial: Path, rank: int, own_names: set[str]) -> files.Files:
    """Write this rank's own tensors, and on rank 0 also the tensors that the ranks share."""
    is_open = [window.count.read() > 0 for window in contents.windows]
    present = [pair for pair in contents.held.items() if pair[1].window is None or is_open[pair[1].window]]
    own = ((name, held.value()) for name, held in present if name in own_names)
    shared = iter([(name, held) for name, held in present if name not in own_names])
    try:
        values = ((name, held.value()) for name, held in shared)
        written = files.write_tensors(partial, "", values) if rank == 0 else {}
    finally:
        # The gathers are collective: all ranks join them, even if rank 0 fails to write.
        for _, held in shared:
            if held.gather:
                held.value()
    return written | files.write_tensors(partial, f"rank_{rank}/", own)


def load_state(step: TrainOneStepCell | Accumulator | ms.Model, directory: str | os.PathLike[str]) -> SavedState:
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
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        See :func:`save_state`.
    """
    trained, folder = check_arguments(_LOAD, step, directory)
    if isinstance(trained, Accumulator) and trained.window.in_batch:
        text = "the state must be loaded between two batches, but got a call inside accumulate(). Load it before."
        raise RuntimeError(f"For '{_LOAD}', {text}")
    contents, world = Contents(trained), current_world(_LOAD)
    state = Path(exchange(_LOADS, lambda: f"{_choose(folder)}" if world.rank == 0 else "")[0])
    found: list[_Found] = []
    # If any rank refuses a number, all numbers are restored. Tensors are too large for that and are checked first.
    with all_or_nothing(contents):
        exchange(_LOADS, lambda: found.append(_load_numbers(contents, world, state)))
    plan, random, places, extra = found[0]
    for parameter, value in plan:
        assign_in_place(parameter, Tensor(value, parameter.dtype))
    if isinstance(trained, Accumulator):
        trained.window.places = dict(enumerate(places))
    elif isinstance(step, ms.Model) and places:
        step.resumed_place = places[0]
    put_random_states(random)
    return contents.described(state, places, extra)


def _choose(directory: Path) -> Path:
    state = files.find_state(directory)
    if state is None:
        has = [*(repr(each.name) for each in files.renamed_states(directory)), "none"][0]
        remedy = "Give the one that save_state() has written to, or the folder of one state."
        got = f"{directory.absolute()}, which has {has}"
        raise ValueError(argument_error(_LOAD, "directory", "a folder with states", got, remedy))
    return state


def _load_numbers(contents: Contents, world: World, state: Path) -> _Found:
    """Check everything, then load the numbers. Return the rest, to assign once all ranks have accepted it."""
    try:
        manifest = files.read_manifest(state)
        everyone = manifest["ranks"]
        batches = _batches(contents, everyone, world.size)
        plan = _plan(contents, world, batches, state, manifest["files"])
        # This rank takes the values of the saving rank with the same number, modulo the number of saving ranks.
        numbers = everyone[world.rank % len(everyone)]
        random = checked_random_states(numbers.get("random"), "the state")
        if world.rank >= len(everyone):
            # With the same random state as another rank, both would draw the same numbers.
            random = random_states()
        data = check_saved(numbers, "where in its data it was saved", {"data": lambda data: isinstance(data, list)})
        places = [DataPosition.of_json(place, len(everyone), random) for place in data["data"]]
        # An open window continues on all ranks, even on those that did not save.
        windows = [{**its, "batches": max(counts)} for its, counts in zip(numbers["windows"], zip(*batches))]
        contents.load_state_dict({**numbers, "windows": windows})
    except DamagedState as error:
        before = [each for each in files.states_in(state.parent) if files.number_of(each) < files.number_of(state)]
        remedy = f"The state before it is {before[-1]}: give that folder." if before else "There is none before it."
        text = f"For '{_LOAD}', the state {state} cannot be used: {error}. Nothing was changed. {remedy}"
        raise ValueError(text) from None
    return plan, random, places, manifest["extra"]


def _batches(contents: Contents, everyone: list[State], ranks: int) -> list[list[int]]:
    """Return the number of batches in each window of each saving rank."""
    if (contents.has_shards or contents.is_partitioned) and len(everyone) != ranks:
        remedy = "Take as many; MindSpore's transform_checkpoints converts what AutoParallel has cut"
        raise another_program(f"has the network's shards of {len(everyone)} processes, not {ranks}. {remedy}")
    windows = [check_saved_list(each.get("windows"), "windows", len(contents.windows)) for each in everyone]
    what, rule = "how many batches its windows had", {"batches": is_count}
    batches = [[check_saved(its, what, rule)["batches"] for its in each] for each in windows]
    limit = getattr(contents.step, "accumulation_steps", None)
    most = max((count for counts in batches for count in counts), default=0)
    if limit is not None and 0 < most >= limit:
        raise another_program(f"has {most} batches in its window, where accumulation_steps is {limit}")
    return batches


def _plan(contents: Contents, world: World, batches: list[list[int]], state: Path, written: files.Files) -> _Plan:
    """Return the new value of each parameter. Raise if the tensors do not match the step."""

    @cache
    def own_of(rank: int) -> files.Arrays:
        return files.read_tensors(state, written, f"rank_{rank}/")

    def parts_of(name: str, window: int, is_gathered: bool) -> list[Array]:
        # A window's sums are added up over the saving ranks. Each rank's part goes to one rank, or to all that gather
        # it.
        opened = [rank for rank, counts in enumerate(batches) if counts[window] > 0][: 1 if name in shared else None]
        takes = [rank for rank in opened if is_gathered or rank % world.size == world.rank]
        sources = [shared if name in shared else own_of(rank) for rank in takes]
        if any(name not in source for source in sources):
            raise another_program(f"lacks {name}")
        return [source[name] for source in sources]

    shared = files.read_tensors(state, written, "")
    found = shared | own_of(world.rank % len(batches))
    names = {name for name, held in contents.held.items() if held.window is None}
    for verb, wrong in (("lacks", names - found.keys()), ("also has", found.keys() - contents.held.keys())):
        if wrong:
            raise another_program(f"{verb} {listed(sorted(wrong), 3)}")
    plan: _Plan = []
    for name, (target, _, gather, window) in contents.held.items():
        parts = [found[name]] if window is None else parts_of(name, window, gather is not None)
        for part in parts:
            theirs = f"{Tensor(np.zeros((), part.dtype)).dtype} {part.shape}"
            ours = f"{target.dtype} {tuple(target.shape)}"
            if theirs != ours:
                raise another_program(f"has {name!r} as {theirs}, where {ours} is wanted")
        plan.append((target, reduce(np.add, parts) if parts else np.zeros(target.shape, np.float32)))
    return plan
