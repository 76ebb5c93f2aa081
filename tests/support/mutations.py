"""Break the package in one place after the other, and see which test fails.

python tests/support/mutations.py [NUMBER...]

A test that cannot fail proves nothing. Each mutation is a mistake that an implementation of windows could make. It is
made in a copy of the project, in which the tests named for it are then run, those of the first tier alone, until one
fails. The table says which; the command ends with status 1 if a mistake goes unseen.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from code_patterns import replaced
from tiers import FIRST_TIER

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """A mistake: the file and the function (or ``Class.method``) that has the old code once, and what takes its place.

    Capitals stand for any expression. ``tests`` are the files of tests that must see it.
    """

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    def applied(self, source: str) -> str:
        return replaced(source, self.place.partition("::")[2], self.old, self.new)


WHOLE_BATCH = ("training/test_train_step.py", "training/test_grad_accumulation.py")
CLIPS = ("gradients/test_grad_clip.py", "gradients/test_loss_scale.py")
RANKS = ("distributed/test_parallel.py", "distributed/test_parallel_precision.py")
STATES = ("checkpoint/test_state.py", "checkpoint/test_state_objects.py")

MUTATIONS = (
    Mutation(
        "the sums are divided by a wrong count",
        "gradients/buffer.py::GradientBuffer.reciprocal_weight",
        "reciprocal(WEIGHT)",
        "reciprocal(WEIGHT + 1.0)",
        WHOLE_BATCH,
    ),
    Mutation(
        "a mean of the means of uneven micro batches",
        "training/micro_step.py::AddMicroBatch.totals",
        "return VALUE * FACTOR, WEIGHT * FACTOR, FACTOR",
        "return VALUE, ops.ones_like(WEIGHT), ONE",
        WHOLE_BATCH,
    ),
    Mutation(
        "the last row of each micro batch is lost",
        "batch/split.py::cut",
        "slice(BEGIN, END)",
        "slice(BEGIN, max(END - 1, BEGIN + 1))",
        WHOLE_BATCH,
    ),
    Mutation(
        "the clip sees gradients before they are unscaled",
        "training/window_end.py::WindowReduction.reduce_and_report",
        "NORM = NORM * SCALE.unscaled(INVERSE)",
        "NORM = NORM * INVERSE",
        CLIPS,
    ),
    Mutation(
        "the norm is that of the sums, before the division",
        "training/window_end.py::WindowReduction.reduce_and_report",
        "NORM = NORM * SCALE.unscaled(INVERSE)",
        "NORM = SCALE.unscaled(NORM)",
        CLIPS,
    ),
    Mutation(
        "the clip of each gradient comes before the division",
        "training/update.py::Update.means",
        """
CLIPPED = map_tensors(ops.partial(scale, FACTOR), SUMS)
if HAS_GROUPS:
    BY_GROUPS = OF_GROUPS
else:
    CLIPPED = CLIP(CLIPPED, NORM, *LIMIT)
""",
        """
CLIPPED = map_tensors(ops.partial(scale, FACTOR), SUMS)
if HAS_GROUPS:
    BY_GROUPS = OF_GROUPS
else:
    CLIPPED = map_tensors(ops.partial(scale, FACTOR), CLIP(tuple(SUMS), NORM, *LIMIT))
""",
        (*CLIPS, "training/test_train_step.py", "loops/test_accumulator_updates.py"),
    ),
    Mutation(
        "nothing is added up over the ranks",
        "parallel/collectives.py::AllReduce.construct",
        "return self.all_reduce(VALUES)",
        "return VALUES",
        RANKS,
    ),
    Mutation(
        "the sums of an open window are not restored",
        "checkpoint/state.py::_values",
        "PARTS = SUMS_OF(NAME, HELD, HELD.window)",
        "PARTS = []",
        STATES,
    ),
    Mutation(
        "the number of batches of an open window is not restored",
        "training/window.py::Window.load_state_dict",
        'self.count.set(COUNTS["batches"])',
        "",
        STATES,
    ),
    Mutation(
        "the loss scale is not restored",
        "training/window.py::Window.load_state_dict",
        'CHOOSER.load_state_dict(SAVED.get("loss_scale"))',
        "",
        STATES,
    ),
    Mutation(
        "the buffer is not cleared after an overflow",
        "training/window_end.py::WindowEnds._skip",
        """
for REDUCER in self.reducers:
    REDUCER.buffer.clear()
""",
        "",
        CLIPS,
    ),
    Mutation(
        "the same, where a graph decides",
        "training/window_end.py::WindowEnd.construct",
        "ops.depend(NORM, BUFFER.clear())",
        "NORM",
        ("training/test_whole_graph.py", "gradients/test_loss_scale.py"),
    ),
    Mutation(
        "the buffer is not cleared after an update",
        "training/update.py::Update.end",
        "BUFFER.clear(UPDATED)",
        "UPDATED",
        WHOLE_BATCH,
    ),
    Mutation(
        "the schedule moves on when an update is skipped",
        "training/window_end.py::WindowEnds._skip",
        """
for REDUCER in self.reducers:
    REDUCER.buffer.clear()
""",
        """
for end in self.of_optimizers:
    end.reducer.buffer.clear()
    end.update.optimizer.global_step.set_data(end.update.optimizer.global_step + 1)
""",
        CLIPS,
    ),
    Mutation(
        "the loss scale stays as it is after an overflow",
        "training/window_end.py::WindowEnds.finish",
        "SCALE.adjust(UPDATED, BAD)",
        "pass",
        CLIPS,
    ),
    Mutation(
        "an overflow makes an update",
        "training/window_end.py::decide",
        "UPDATED = ops.logical_and(UPDATED, ops.logical_not(OVERFLOW))",
        "pass",
        CLIPS,
    ),
    Mutation(
        "a window whose norm is too large makes an update",
        "gradients/norm_limit.py::_unless",
        "return ops.logical_and(updated, ops.logical_not(ops.logical_and(is_above, ops.isfinite(norm))))",
        "return updated",
        ("gradients/test_skip_above.py",),
    ),
    Mutation(
        "the norms of before are not in a state",
        "training/settings.py::StepSettings.kept_cells",
        "return self.precision.loss_scale, self.norm_limit, self.clip",
        "return self.precision.loss_scale, self.clip",
        ("gradients/test_skip_above.py",),
    ),
    Mutation(
        "a window that is carried takes the length of the next epoch",
        "loops/train_step.py::HostDrivenStep.steps_of_window",
        "self.epoch_of(BEGUN)",
        "self.epoch_of(0)",
        ("loops/test_model_schedule.py",),
    ),
    Mutation(
        "what fails in mid-batch leaves its rows in the window",
        "training/window.py::Window._end_failed",
        "self.discard(for_all=True)",
        "",
        ("training/test_train_step_failures.py", "refusals/test_call_orders.py"),
    ),
    Mutation(
        "a gradient is added without its factor",
        "backend/arithmetic.py::add_in_place",
        "ops.assign_add(TOTAL, PART * FACTOR)",
        "ops.assign_add(TOTAL, PART)",
        WHOLE_BATCH,
    ),
    Mutation(
        "the optimizer's shard of a parameter follows the rows of another rank",
        "parallel/shards.py::_assign_rows",
        "WHOLE[INDEX * ROWS : (INDEX + 1) * ROWS]",
        "WHOLE[:ROWS]",
        RANKS,
    ),
    Mutation(
        "a partitioned step divides by a wrong count",
        "static_graph/partitioned_step.py::PartitionedStep.construct",
        "reciprocal(WEIGHT)",
        "reciprocal(WEIGHT + 1.0)",
        ("static_graph/test_partitioned_step.py", "distributed/test_semi_auto_parallel.py"),
    ),
    Mutation(
        "what is called in the backward pass gets the gradient of a sum over rows",
        "training/micro_step.py::backward_start_of",
        "LOSS.is_prepared or HAS_OWN_BACKWARD",
        "LOSS.is_prepared",
        ("programs/test_python_decides.py",),
    ),
    Mutation(
        "an optimizer that keeps its gradients is given the sums themselves",
        "training/update.py::EagerUpdate.__call__",
        "COPIES = tuple(TOTAL.value() for TOTAL in SUMS)",
        "pass",
        ("programs/test_optimizers_and_schedules.py",),
    ),
    Mutation(
        "an optimizer goes on with the memory that parameters had before a checkpoint was loaded",
        "backend/network_code.py::JitParts.follow",
        "self.places != PLACES",
        "not PLACES",
        ("training/test_train_step_checkpoint.py", "backend/test_optimizers.py"),
    ),
    Mutation(
        "a loss that misses the mean of its parts is taken for rounding",
        "advice/loss_measurement.py::LossMeasurement._finding",
        "abs(error_of(WHOLE, *PARTS)) <= LOSSES.rounding(WHOLE, *PARTS)",
        "abs(error_of(WHOLE, *PARTS)) <= 10",
        ("batch/test_losses_as_written.py",),
    ),
    Mutation(
        "the measurement of a loss does not put the random states back",
        "backend/snapshot.py::RandomNumbers.put_back",
        "put_random_states(STATES)",
        "",
        ("advice/test_loss_measurement.py",),
    ),
    Mutation(
        "iterators of a prepared dataset do not know its last batch",
        "loops/dataloader.py::PreparedDataset._call",
        """
SETTINGS = inspect.signature(METHOD).bind(*ARGS, **KWARGS).arguments | ONE_EPOCH
return PreparedIterator(self, ITERATOR)
""",
        """
SETTINGS = inspect.signature(METHOD).bind(*ARGS, **KWARGS).arguments | ONE_EPOCH
return METHOD(**SETTINGS)
""",
        ("loops/test_accumulator_loops.py",),
    ),
    Mutation(
        "a window ends with a sink in place of the pass",
        "loops/epoch.py::PassSteps.on_train_step_end",
        "PASSES.in_pass = PASSES.batches != 0",
        "PASSES.in_pass = PASSES.done % params.batch_num != 0",
        ("loops/test_data_sink.py",),
    ),
    Mutation(
        "a loop goes on with its own count after a checkpoint was loaded",
        "gradients/buffer.py::_write",
        "COUNT.is_stale = True",
        "",
        ("training/test_device_reads.py", "loops/test_accumulator.py"),
    ),
    Mutation(
        "a gradient is divided by the rows of an earlier batch",
        "training/micro_step.py::EagerMicroStep.__call__",
        "self.forgets_passes",
        "self.forgets_passes is None",
        ("training/test_bce_with_logits.py",),
    ),
)


def failing_test(mutation: Mutation | None, files: Sequence[str]) -> str:
    """Run these files of tests in a copy of the project with a mistake in it, and return the first test that fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for name in ("ms_gradaccum", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            broken = copy / "ms_gradaccum" / mutation.file
            broken.write_text(mutation.applied(broken.read_text()))
        command = [sys.executable, "-m", "pytest", "-qx", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", FIRST_TIER]
        command += [f"tests/{file}" for file in files]
        environment = {**os.environ, "PYTHONPATH": folder, "COLUMNS": "1000"}
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) tests/([^\s\[]+)", ran.stdout, re.M)
    # 0 is that all passed, 1 that one failed; anything else is a run that proves nothing.
    if ran.returncode != bool(failed):
        raise RuntimeError(f"pytest ended with status {ran.returncode}:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}")
    return failed.group(1).rpartition("/")[2] if failed else ""


def seen(mutation: Mutation | None) -> tuple[Mutation | None, str]:
    """Return a mutation with the test that sees it; without one, try all files that any of them names."""
    files = mutation.tests if mutation else sorted({file for each in MUTATIONS for file in each.tests})
    return mutation, failing_test(mutation, files)


def main(numbers: Sequence[str]) -> int:
    """Try these mutations, or all and what is not broken first. Print a table; return the exit status."""
    tried: list[Mutation | None] = [MUTATIONS[int(number) - 1] for number in numbers] or [None, *MUTATIONS]
    as_wished = True
    print("| mistake | where | test that sees it |\n| --- | --- | --- |")
    # As many at a time as there are cores on the smallest machine that the tests are for.
    with ThreadPoolExecutor(2) as pool:
        for mutation, failed in pool.map(seen, tried):
            as_wished &= bool(failed) == (mutation is not None)
            what, where = (mutation.name, f"`{mutation.file}`") if mutation else ("none", "")
            print(f"| {what} | {where} | `{failed}` |", flush=True)
    return 0 if as_wished else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
