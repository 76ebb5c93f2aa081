"""Run files of tests `on_ranks` one after the other in one job: to start one takes longer than most of them."""

import importlib
import os
import time
from unittest import mock

import mindspore as ms
import quick_mindspore
from mindspore import communication
from open_window import silent_advisor

from ms_gradaccum.advice.advisor import Advisor
from ms_gradaccum.advice.loss_measurement import LossMeasurement
from ms_gradaccum.training import window

# Parts that compare numbers and read no warning: advice would take much of their time.
SILENT = {"test_grad_cache_of_ranks", "test_parallel_precision", "test_report", "test_states_of_ranks"}

before_batch = LossMeasurement.before_batch


def once(measurement):
    measurement.schedule.is_due = False
    return before_batch(measurement) if measurement.schedule.batches < 1 else ""


def run(names, folder, states):
    """In a process of the job, run these parts and yield the outcome of each by its name."""
    quick_mindspore.install()
    import ranks  # It meets the others.

    parts, mode = {}, ms.get_context("mode")
    for part in names:
        # Each begins as a process of its own would, but for the ranks, which have met.
        ms.set_context(mode=mode)
        os.environ.pop("MS_JIT", None)
        # Only one part measures losses again, at the 2nd, 4th ... batch; the others are about something else.
        LossMeasurement.before_batch = before_batch if part == "test_loops_of_ranks" else once
        window.Advisor = silent_advisor if part in SILENT else Advisor
        (folder / part).mkdir(parents=True, exist_ok=True)
        os.environ |= {"REPORT_FOLDER": str(folder / part), "STATES": str(states / part)}
        begin = time.process_time()
        with mock.patch.object(communication, "init"):
            importlib.import_module(part)
            parts[part] = ranks.run(part)
        print(f"{part}: {time.process_time() - begin:.0f} s of a core", flush=True)
    yield parts
