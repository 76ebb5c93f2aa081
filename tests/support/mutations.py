"""Break the package in one place after the other, and see which tests fail.

python tests/support/mutations.py [NUMBER...]

A test that cannot fail proves nothing. Each mutation is a mistake that an implementation of windows could make. It is
made in a copy of the project, in which the tests named for it are then run. The table says which of them fail; the
command ends with status 1 if a mistake goes unseen.
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

ROOT = Path(__file__).parents[2]
# As many at a time as there are cores on the smallest machine that the tests are for.
_AT_A_TIME = 2
# Names of tests that are printed for each mutation.
_PRINTED = 3


@dataclass(frozen=True)
class Mutation:
    """A mistake.

    Attributes:
        name: What is wrong then.
        file: Where, inside the package.
        old: The text that is there, once.
        new: What takes its place.
        tests: The files of tests that must see it, inside ``tests``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the text of the file with the mistake in it."""
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times {self.old!r}, not once"
        return text.replace(self.old, self.new)


WHOLE_BATCH = ("training/test_train_step.py", "training/test_grad_accumulation.py", "programs/test_losses.py")
CLIPS = ("gradients/test_grad_clip.py", "gradients/test_clip_and_scale.py", "gradients/test_loss_scale.py")
RANKS = ("distributed/test_parallel.py", "distributed/test_parallel_precision.py")
STATES = ("checkpoint/test_state.py", "checkpoint/test_state_objects.py")

MUTATIONS = (
    Mutation(
        "the sums are divided by a wrong count",
        "gradients/buffer.py",
        "        return reciprocal(self.weight)\n",
        "        return reciprocal(self.weight + 1.0)\n",
        WHOLE_BATCH,
    ),
    Mutation(
        "a mean of the means of uneven micro batches",
        "training/micro_step.py",
        "return value * factor, weight * factor, factor",
        "return value, ops.ones_like(weight), ONE",
        WHOLE_BATCH,
    ),
    Mutation(
        "the last row of each micro batch is lost",
        "batch/split.py",
        "slice(begin, end))]",
        "slice(begin, max(end - 1, begin + 1)))]",
        WHOLE_BATCH,
    ),
    Mutation(
        "the clip sees gradients before they are unscaled",
        "training/window_end.py",
        "norm = norm * self.loss_scale.unscaled(inverse)",
        "norm = norm * inverse",
        CLIPS,
    ),
    Mutation(
        "the norm is that of the sums, before the division",
        "training/window_end.py",
        "norm = norm * self.loss_scale.unscaled(inverse)",
        "norm = self.loss_scale.unscaled(norm)",
        CLIPS,
    ),
    Mutation(
        "the clip of each gradient comes before the division",
        "training/update.py",
        "clipped = self.clip(clipped, norm, *limit)",
        "clipped = map_tensors(ops.partial(scale, factor), self.clip(tuple(sums), norm, *limit))",
        (*CLIPS, "training/test_train_step.py", "loops/test_accumulator_updates.py"),
    ),
    Mutation(
        "nothing is added up over the ranks",
        "parallel/collectives.py",
        "            return self.all_reduce(values)",
        "            return values",
        RANKS,
    ),
    Mutation(
        "the sums of an open window are not restored",
        "checkpoint/state.py",
        "        for part in parts:\n",
        "        parts = parts if held.window is None else []\n        for part in parts:\n",
        STATES,
    ),
    Mutation(
        "the number of batches of an open window is not restored",
        "training/window.py",
        '        self.count.set(counts["batches"])\n',
        "",
        STATES,
    ),
    Mutation(
        "the loss scale is not restored",
        "training/window.py",
        '        self.loss_scale.chooser_state.load_state_dict(saved.get("loss_scale"))\n',
        "",
        STATES,
    ),
    Mutation(
        "the buffer is not cleared after an overflow",
        "training/window_end.py",
        "        for reducer in self.reducers:\n            reducer.buffer.clear()\n",
        "",
        CLIPS,
    ),
    Mutation(
        "the same, where a graph decides",
        "training/window_end.py",
        "clipped_norm = ops.depend(norm, self.buffer.clear())",
        "clipped_norm = norm",
        ("training/test_whole_graph.py", "gradients/test_loss_scale.py"),
    ),
    Mutation(
        "the buffer is not cleared after an update",
        "training/update.py",
        "return self.buffer.clear(self.reducer.after_update(updated))",
        "return self.reducer.after_update(updated)",
        WHOLE_BATCH,
    ),
    Mutation(
        "the schedule moves on when an update is skipped",
        "training/window_end.py",
        "        for reducer in self.reducers:\n            reducer.buffer.clear()\n",
        "        for end in self.of_optimizers:\n"
        "            end.buffer.clear()\n"
        "            end.update.optimizer.global_step.set_data(end.update.optimizer.global_step + 1)\n",
        CLIPS,
    ),
    Mutation(
        "the loss scale stays as it is after an overflow",
        "training/window_end.py",
        "        self.settings.precision.loss_scale.adjust(updated, bad)\n",
        "        pass\n",
        CLIPS,
    ),
    Mutation(
        "an overflow makes an update",
        "training/window_end.py",
        "updated = ops.logical_and(updated, ops.logical_not(overflow))",
        "pass",
        CLIPS,
    ),
    Mutation(
        "what fails in mid-batch leaves its rows in the window",
        "training/window.py",
        "            self.discard(for_all=True)\n            warn_of_dropped(self.owner, batches)\n",
        "            warn_of_dropped(self.owner, batches)\n",
        ("training/test_train_step_failures.py", "refusals/test_call_orders.py"),
    ),
    Mutation(
        "a gradient is added without its factor",
        "backend/arithmetic.py",
        "ops.assign_add(total, as_dtype(part, total.dtype) * factor)",
        "ops.assign_add(total, as_dtype(part, total.dtype))",
        WHOLE_BATCH,
    ),
    Mutation(
        "the optimizer's shard of a parameter follows the rows of another rank",
        "parallel/shards.py",
        "return ops.assign(shard, whole[index * rows : (index + 1) * rows])",
        "return ops.assign(shard, whole[:rows])",
        RANKS,
    ),
    Mutation(
        "a partitioned step divides by a wrong count",
        "static_graph/partitioned_step.py",
        "        factor = reciprocal(weight)\n",
        "        factor = reciprocal(weight + 1.0)\n",
        ("distributed/test_semi_auto_parallel.py",),
    ),
    Mutation(
        "what is called in the backward pass gets the gradient of a sum over rows",
        "training/micro_step.py",
        "weighted_loss.is_prepared or NetworkCode(weighted_loss.network).has_own_backward()",
        "weighted_loss.is_prepared",
        ("programs/test_python_decides.py",),
    ),
    Mutation(
        "an optimizer that keeps its gradients is given the sums themselves",
        "training/update.py",
        "tuple(total.value() for total in self.sums) if self.is_users else tuple(self.sums)",
        "tuple(self.sums)",
        ("programs/test_optimizers_and_schedules.py",),
    ),
    Mutation(
        "an optimizer goes on with the memory that parameters had before a checkpoint was loaded",
        "backend/network_code.py",
        "        if self.places != places:\n",
        "        if not places:\n",
        ("training/test_train_step_checkpoint.py", "backend/test_optimizers.py"),
    ),
    Mutation(
        "a loss that misses the mean of its parts is taken for rounding",
        "advice/loss_measurement.py",
        "        if error_of(whole, *parts) <= self.losses.rounding(whole, *parts):\n",
        "        if error_of(whole, *parts) <= 10:\n",
        ("batch/test_losses_as_written.py", "programs/test_losses.py"),
    ),
    Mutation(
        "the measurement of a loss does not put the random states back",
        "backend/snapshot.py",
        "        put_random_states(self.random)\n",
        "",
        ("advice/test_loss_measurement.py",),
    ),
    Mutation(
        "iterators of a prepared dataset do not know its last batch",
        "loops/dataloader.py",
        "return PreparedIterator(self, lambda data: getattr(data, name)(**settings))",
        "return method(**settings)",
        ("loops/test_accumulator_loops.py",),
    ),
    Mutation(
        "a window ends with a sink in place of the pass",
        "loops/epoch.py",
        "        passes.in_pass = passes.batches != 0\n",
        "        passes.in_pass = passes.done % params.batch_num != 0\n",
        ("loops/test_data_sink.py",),
    ),
    Mutation(
        "a loop goes on with its own count after a checkpoint was loaded",
        "gradients/buffer.py",
        "        count.is_stale = True\n",
        "",
        ("gradients/test_batch_count.py", "loops/test_accumulator.py"),
    ),
    Mutation(
        "a gradient is divided by the rows of an earlier batch",
        "training/micro_step.py",
        "        if self.forgets_passes:\n",
        "        if self.forgets_passes is None:\n",
        ("training/test_bce_with_logits.py",),
    ),
)


def failing_tests(mutation: Mutation | None, files: Sequence[str]) -> list[str]:
    """Run these files of tests in a copy of the project with a mistake in it, and return the tests that fail."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for name in ("ms_gradaccum", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            broken = copy / "ms_gradaccum" / mutation.file
            broken.write_text(mutation.applied(broken.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        command += [f"tests/{file}" for file in files]
        environment = {**os.environ, "PYTHONPATH": folder, "COLUMNS": "1000"}
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", ran.stdout, re.M)
    # 0 is that all passed, 1 that some failed; anything else is a run that proves nothing.
    if ran.returncode != bool(failed):
        raise RuntimeError(f"pytest ended with status {ran.returncode}:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}")
    return failed


def seen(mutation: Mutation | None) -> tuple[Mutation | None, list[str]]:
    """Return a mutation with the tests that fail; without one, with all files that any of them names."""
    files = mutation.tests if mutation else sorted({file for each in MUTATIONS for file in each.tests})
    return mutation, failing_tests(mutation, files)


def main(numbers: Sequence[str]) -> int:
    """Try these mutations, or all and what is not broken first. Print a table; return the exit status."""
    tried: list[Mutation | None] = [MUTATIONS[int(number) - 1] for number in numbers] or [None, *MUTATIONS]
    as_wished = True
    print("| mistake | where | tests that fail | among them |\n| --- | --- | --: | --- |")
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for mutation, failed in pool.map(seen, tried):
            as_wished &= bool(failed) == (mutation is not None)
            named = ", ".join(f"`{name}`" for name in _one_of_each_function(failed))
            what, where = (mutation.name, f"`{mutation.file}`") if mutation else ("none", "")
            print(f"| {what} | {where} | {len(failed)} | {named} |", flush=True)
    return 0 if as_wished else 1


def _one_of_each_function(tests: Sequence[str]) -> list[str]:
    functions = dict.fromkeys(name.partition("[")[0].rpartition("/")[2] for name in tests)
    return list(functions)[:_PRINTED]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
