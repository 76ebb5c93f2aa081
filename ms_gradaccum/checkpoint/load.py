"""``load_state``: continue a training from a saved state."""

import os
from functools import cache, reduce
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from ms_gradaccum._checks import (
    DamagedState,
    State,
    all_or_nothing,
    another_program,
    argument_error,
    check_saved,
    check_saved_list,
    is_count,
    listed,
)
from ms_gradaccum.backend import random_state
from ms_gradaccum.backend.plain_state import Json, assign_in_place
from ms_gradaccum.backend.tensors import Array
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import Contents, SavedState, check_arguments, exchange
from ms_gradaccum.loops.accumulator import Accumulator
from ms_gradaccum.loops.data_position import PassPlace
from ms_gradaccum.parallel.world import World, current_world
from ms_gradaccum.training.train_step import TrainOneStepCell

_OWNER = "load_state"
# Parameters and their new values.
_Plan = list[tuple[Parameter, Array]]
# What is assigned once all ranks have accepted the state: tensors, random states, positions in the data, and `extra`.
_Found = tuple[_Plan, State, list[PassPlace], dict[str, Json]]


def load_state(step: TrainOneStepCell | Accumulator | ms.Model, directory: str | os.PathLike[str]) -> SavedState:
    r"""Load the state that :func:`save_state` has saved into a training step.

    Build the step as before: with the same network, optimizer and settings. The whole state is checked first; after an
    error the step is unchanged. Nothing in the files is executed.

    With as many processes as before, the training continues bit for bit, except for operators with a random state
    inside a kernel, such as ``nn.Dropout`` on CPU, which MindSpore restarts from their seed. The number of processes
    may change, and data parallelism can be replaced by HSDP: sums of an open window are added up, and sharded datasets
    go on with the samples that are left. A semi-auto-parallel step needs as many processes as before, or MindSpore's
    functions for distributed checkpoints.

    Args:
        step (Union[TrainOneStepCell, Accumulator, Model]): The training step. The prepared datasets of an Accumulator
            continue from their positions, in the order in which they are prepared; a Model's dataset in
            ``train(..., resume=True)``.
        directory (Union[str, PathLike]): Folder of states, of which the last one is loaded, or the folder of one state.

    Returns:
        :class:`SavedState`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `directory` is no path, there is no state in it, it is damaged, or of another program.
        RuntimeError: If an Accumulator is in the middle of a batch.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        See :func:`save_state`.
    """
    trained, folder = check_arguments(_OWNER, step, directory)
    if isinstance(trained, Accumulator) and trained.window.in_batch:
        raise RuntimeError(
            f"For '{_OWNER}', the state must be loaded between two batches, but got a call inside accumulate(). "
            f"Call it before the loop."
        )
    contents, world = Contents(trained), current_world(_OWNER)
    state = Path(exchange(world.size, lambda: f"{_choose(folder)}" if world.rank == 0 else "")[0])
    found: list[_Found] = []
    # Numbers are restored if this or another rank refuses one. Tensors are too large, so they are checked first.
    with all_or_nothing(contents):
        exchange(world.size, lambda: found.append(_load_numbers(contents, world, state)))
    plan, random, places, extra = found[0]
    for parameter, value in plan:
        assign_in_place(parameter, Tensor(value, parameter.dtype))
    if isinstance(trained, Accumulator):
        trained.window.places = dict(enumerate(places))
    elif isinstance(step, ms.Model) and places:
        step.resumed_place = places[0]
    if random:
        random_state.put(random)
    return contents.described(state, places, extra)


def _load_numbers(contents: Contents, world: World, state: Path) -> _Found:
    """Check everything, then load the numbers. Return the rest, which is assigned once all ranks have accepted it."""
    try:
        manifest = files.read_manifest(state)
        everyone = manifest["ranks"]
        batches = _batches(contents, everyone, world.size)
        plan = _plan(contents, world, batches, state, manifest["files"])
        # This rank takes the values of the saving rank with the same number, modulo the number of saving ranks.
        numbers = everyone[world.rank % len(everyone)]
        random = random_state.checked(numbers.get("random"), "the state")
        if not isinstance(numbers.get("data"), list):
            raise DamagedState("the state does not say where in its data it was saved")
        places = [PassPlace.of_json(place, len(everyone), random) for place in numbers["data"]]
        # An open window continues on all ranks, also on those that did not save.
        windows = [{**its, "batches": max(counts)} for its, counts in zip(numbers["windows"], zip(*batches))]
        contents.load_state_dict({**numbers, "windows": windows})
    except DamagedState as error:
        before = [each for each in files.states_in(state.parent) if files.number_of(each) < files.number_of(state)]
        remedy = f"The state before it is {before[-1]}: give that folder." if before else "There is none before it."
        raise ValueError(
            f"For '{_OWNER}', the state {state} cannot be used: {error}. Nothing was changed. {remedy}"
        ) from None
    # With the random state of another rank, both would draw the same numbers.
    return plan, random if world.rank < len(everyone) else {}, places, manifest["extra"]


def _batches(contents: Contents, everyone: list[State], ranks: int) -> list[list[int]]:
    """Return the number of batches in each window of each saving rank."""
    if (contents.has_shards or contents.is_partitioned) and len(everyone) != ranks:
        what, remedy = "the network's shards of", "Take as many"
        if contents.is_partitioned:
            what, remedy = "the compiler's partition over", "MindSpore's transform_checkpoints makes one of the other"
        raise another_program(f"has {what} {len(everyone)} processes, not {ranks}. {remedy}")
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
        # A window is one sum over the saving ranks: each part goes to one rank, or to all of those that gather it.
        opened = [rank for rank, counts in enumerate(batches) if counts[window] > 0]
        takes = [rank for rank in opened if is_gathered or rank % world.size == world.rank]
        if name in shared:
            return [shared[name]] if opened and (is_gathered or world.rank == 0) else []
        if any(name not in own_of(rank) for rank in takes):
            raise another_program(f"lacks {name}")
        return [own_of(rank)[name] for rank in takes]

    shared = files.read_tensors(state, written, "")
    found = shared | own_of(world.rank % len(batches))
    names = {name for name, held in contents.held.items() if held.window is None}
    pairs = (("lacks", names - found.keys()), ("also has", found.keys() - contents.held.keys()))
    wrong = [f"{verb} {listed(sorted(each), 3)}" for verb, each in pairs if each]
    if wrong:
        raise another_program(" and ".join(wrong))
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


def _choose(directory: Path) -> Path:
    state = files.find_state(directory)
    if state is None:
        others = files.renamed_states(directory)
        has = f"which has {others[0].name!r}" if others else "which has none"
        got = f"{directory.absolute()}, {has if directory.exists() else 'which is not there'}"
        remedy = "Give the one that save_state() has written to, or the folder of one state."
        raise ValueError(argument_error(_OWNER, "directory", "a folder with states", got, remedy))
    return state
