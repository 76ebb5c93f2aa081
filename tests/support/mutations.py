"""Break the package in one place after the other, and see which test fails.

python tests/support/mutations.py [NUMBER...]

A test that cannot fail proves nothing. Each mutation is a mistake that an implementation of windows could make. It is
made in a copy of the project, in which the tests named for it are then run, those of the first tier alone, until one
fails. The table says which; the command ends with status 1 if a mistake goes unseen.
"""

import ast
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
from textwrap import indent

from tiers import FIRST_TIER

ROOT = Path(__file__).parents[2]
# As many at a time as there are cores on the smallest machine that the tests are for.
_AT_A_TIME = 2


def replaced(source: str, function: str, old: str, new: str) -> str:
    """Return a source in which the code ``old``, which ``function`` has once, is ``new``.

    Neither line breaks nor comments matter. The function may be a ``Class.method``.
    """
    tree = parent = node = ast.parse(source)
    for part in function.split("."):
        found = [each for each in node.body if getattr(each, "name", "") == part]
        if len(found) != 1:
            raise ValueError(f"there are {len(found)} definitions of {function}, not one")
        parent, node = node, found[0]
    code, forms = ast.unparse(node), {old: new}
    if "\n" in old + new:  # Statements, which stand at one depth.
        forms = {f"\n{indent(old, depth)}\n": f"\n{indent(new, depth)}\n" for depth in ("    ", " " * 8, " " * 12)}
        code += "\n"
    if (times := sum(map(code.count, forms))) != 1:
        raise ValueError(f"{function} has {times} times {old!r}, not once")
    for form, other in forms.items():
        code = code.replace(form, other)
    parent.body[parent.body.index(node)] = ast.parse(code).body[0]
    return ast.unparse(tree)


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """Return the source of the file with the mistake in it."""
        return replaced(source, self.function, self.old, self.new)


GROUPS = {
    "WHOLE_BATCH": ("training/test_train_step.py", "training/test_grad_accumulation.py", "programs/test_losses.py"),
    "CLIPS": ("gradients/test_grad_clip.py", "gradients/test_clip_and_scale.py", "gradients/test_loss_scale.py"),
    "RANKS": ("distributed/test_parallel.py", "distributed/test_parallel_precision.py"),
    "STATES": ("checkpoint/test_state.py", "checkpoint/test_state_objects.py"),
}
# Of each mistake what is wrong then, the file in the package and the function, the tests that must see it or groups of
# them, and the code that the function has once and what takes its place.
MISTAKES = """
the sums are divided by a wrong count
gradients/buffer.py GradientBuffer.reciprocal_weight
WHOLE_BATCH
- reciprocal(self.weight)
+ reciprocal(self.weight + 1.0)

a mean of the means of uneven micro batches
training/micro_step.py AddMicroBatch.totals
WHOLE_BATCH
- return (value * factor, weight * factor, factor)
+ return (value, ops.ones_like(weight), ONE)

the last row of each micro batch is lost
batch/split.py cut
WHOLE_BATCH
- slice(begin, end)
+ slice(begin, max(end - 1, begin + 1))

the clip sees gradients before they are unscaled
training/window_end.py WindowReduction.reduce_and_report
CLIPS
- norm = norm * self.loss_scale.unscaled(inverse)
+ norm = norm * inverse

the norm is that of the sums, before the division
training/window_end.py WindowReduction.reduce_and_report
CLIPS
- norm = norm * self.loss_scale.unscaled(inverse)
+ norm = self.loss_scale.unscaled(norm)

the clip of each gradient comes before the division
training/update.py Update.means
CLIPS training/test_train_step.py loops/test_accumulator_updates.py
- clipped = map_tensors(ops.partial(scale, factor), sums)
- if self.clip.has_groups:
-     clipped = self.clip(clipped, chunk_of(norms, begin, end))
- else:
-     clipped = self.clip(clipped, norm, *limit)
+ clipped = map_tensors(ops.partial(scale, factor), sums)
+ if self.clip.has_groups:
+     clipped = self.clip(clipped, chunk_of(norms, begin, end))
+ else:
+     clipped = map_tensors(ops.partial(scale, factor), self.clip(tuple(sums), norm, *limit))

nothing is added up over the ranks
parallel/collectives.py AllReduce.construct
RANKS
- return self.all_reduce(values)
+ return values

the sums of an open window are not restored
checkpoint/state.py _values
STATES
- parts = saved.parts_of(name, held)
+ parts = saved.parts_of(name, held)
+ parts = parts if held.window is None else []

the number of batches of an open window is not restored
training/window.py Window.load_state_dict
STATES
- self.count.set(counts['batches'])
+ pass

the loss scale is not restored
training/window.py Window.load_state_dict
STATES
- self.loss_scale.chooser_state.load_state_dict(saved.get('loss_scale'))
+ pass

the buffer is not cleared after an overflow
training/window_end.py WindowEnds._skip
CLIPS
- for reducer in self.reducers:
-     reducer.buffer.clear()
+ pass

the same, where a graph decides
training/window_end.py WindowEnd.construct
training/test_whole_graph.py gradients/test_loss_scale.py
- ops.depend(norm, self.buffer.clear())
+ norm

the buffer is not cleared after an update
training/update.py Update.end
WHOLE_BATCH
- self.buffer.clear(self.reducer.after_update(updated))
+ self.reducer.after_update(updated)

the schedule moves on when an update is skipped
training/window_end.py WindowEnds._skip
CLIPS
- for reducer in self.reducers:
-     reducer.buffer.clear()
+ for end in self.of_optimizers:
+     end.buffer.clear()
+     end.update.optimizer.global_step.set_data(end.update.optimizer.global_step + 1)

the loss scale stays as it is after an overflow
training/window_end.py WindowEnds._adjust_scale
CLIPS
- self.settings.precision.loss_scale.adjust(updated, bad)
+ pass

an overflow makes an update
training/window_end.py decide
CLIPS
- updated = ops.logical_and(updated, ops.logical_not(overflow))
+ pass

a window whose norm is too large makes an update
gradients/norm_limit.py _unless
gradients/test_skip_above.py
- return ops.logical_and(updated, ops.logical_not(ops.logical_and(is_above, ops.isfinite(norm))))
+ return updated

the norms of before are not in a state
training/settings.py StepSettings.kept_cells
gradients/test_skip_above.py
- return (self.precision.loss_scale, self.norm_limit, self.clip)
+ return (self.precision.loss_scale, self.clip)

a window that is carried takes the length of the next epoch
loops/train_step.py HostDrivenStep.steps_of_window
loops/test_model_schedule.py
- self.epoch_of(begun)
+ self.epoch_of(0)

what fails in mid-batch leaves its rows in the window
training/window.py Window._end_failed
training/test_train_step_failures.py refusals/test_call_orders.py
- self.discard(for_all=True)
+ pass

a gradient is added without its factor
backend/arithmetic.py add_in_place
WHOLE_BATCH
- ops.assign_add(total, as_dtype(part, total.dtype) * factor)
+ ops.assign_add(total, as_dtype(part, total.dtype))

the optimizer's shard of a parameter follows the rows of another rank
parallel/shards.py _assign_rows
RANKS
- whole[index * rows:(index + 1) * rows]
+ whole[:rows]

a partitioned step divides by a wrong count
static_graph/partitioned_step.py PartitionedStep.construct
static_graph/test_partitioned_step.py distributed/test_semi_auto_parallel.py
- reciprocal(weight)
+ reciprocal(weight + 1.0)

what is called in the backward pass gets the gradient of a sum over rows
training/micro_step.py backward_start_of
programs/test_python_decides.py
- weighted_loss.is_prepared or NetworkCode(weighted_loss.network).has_own_backward()
+ weighted_loss.is_prepared

an optimizer that keeps its gradients is given the sums themselves
training/update.py EagerUpdate.__call__
programs/test_optimizers_and_schedules.py
- grads = tuple((total.value() for total in self.sums))
+ pass

an optimizer goes on with the memory that parameters had before a checkpoint was loaded
backend/network_code.py JitParts.follow
training/test_train_step_checkpoint.py backend/test_optimizers.py
- self.places != places
+ not places

a loss that misses the mean of its parts is taken for rounding
advice/loss_measurement.py LossMeasurement._finding
batch/test_losses_as_written.py programs/test_losses.py
- abs(error_of(whole, *parts)) <= losses.rounding(whole, *parts)
+ abs(error_of(whole, *parts)) <= 10

the measurement of a loss does not put the random states back
backend/snapshot.py RandomNumbers.put_back
advice/test_loss_measurement.py
- put_random_states(self.states)
+ pass

iterators of a prepared dataset do not know its last batch
loops/dataloader.py PreparedDataset._call
loops/test_accumulator_loops.py
- settings = inspect.signature(method).bind(*args, **kwargs).arguments | {'num_epochs': 1}
- return PreparedIterator(self, lambda data: getattr(data, name)(**settings))
+ settings = inspect.signature(method).bind(*args, **kwargs).arguments | {'num_epochs': 1}
+ return method(**settings)

a window ends with a sink in place of the pass
loops/epoch.py PassSteps.on_train_step_end
loops/test_data_sink.py
- passes.in_pass = passes.batches != 0
+ passes.in_pass = passes.done % params.batch_num != 0

a loop goes on with its own count after a checkpoint was loaded
gradients/buffer.py _write
training/test_device_reads.py loops/test_accumulator.py
- count.is_stale = True
+ pass

a gradient is divided by the rows of an earlier batch
training/micro_step.py EagerMicroStep.__call__
training/test_bce_with_logits.py
- self.forgets_passes
+ self.forgets_passes is None
"""


def parsed(mistake: str) -> Mutation:
    name, place, tests, *change = mistake.splitlines()
    file, function = place.split()
    old, new = ("\n".join(line[2:] for line in change if line[0] == sign) for sign in "-+")
    files = [file for test in tests.split() for file in GROUPS.get(test, (test,))]
    return Mutation(name, file, function, old, new, tuple(files))


MUTATIONS = tuple(map(parsed, MISTAKES.strip().split("\n\n")))


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
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for mutation, failed in pool.map(seen, tried):
            as_wished &= bool(failed) == (mutation is not None)
            what, where = (mutation.name, f"`{mutation.file}`") if mutation else ("none", "")
            print(f"| {what} | {where} | `{failed}` |", flush=True)
    return 0 if as_wished else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
