"""Run workers one after the other in one job: to start a job of its own takes longer than most of them.

many_parts.py PART...          under msrun; each part is a worker, by the name of its file; it runs when it
                               is imported or, if it has one, in its `main`
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import mindspore as ms
from launch import report
from mindspore import communication
from open_window import silent_advisor

from ms_gradaccum.advice.advisor import Advisor
from ms_gradaccum.advice.loss_measurement import LossMeasurement
from ms_gradaccum.training import window

# Parts that compare numbers and read no warning: advice would take much of their time.
SILENT = {"ema_worker", "grad_cache_worker", "precision_worker", "report_worker", "state_worker"}

before_batch = LossMeasurement.before_batch


def once(measurement):
    """Measure the first batch alone."""
    measurement.schedule.is_due = False
    return before_batch(measurement) if measurement.schedule.batches < 1 else ""


# Where MindSpore can compile for GPU, it would look for one.
ms.set_context(device_target="CPU")
communication.init()
rank = communication.get_rank()
folder, states = Path(os.environ["REPORT_FOLDER"]), Path(os.environ["STATES"])
parts, mode = {}, ms.get_context("mode")
for part in sys.argv[1:]:
    # Each begins as a process of its own would, but for the ranks, which have met.
    ms.set_context(mode=mode)
    os.environ.pop("MS_JIT", None)
    # Only one part measures losses again, at the 2nd, 4th ... batch; the others are about something else.
    LossMeasurement.before_batch = before_batch if part == "loop_worker" else once
    window.Advisor = silent_advisor if part in SILENT else Advisor
    os.environ |= {"REPORT_FOLDER": str(folder / part), "STATES": str(states / part)}
    (folder / part).mkdir(exist_ok=True)
    begin = time.process_time()
    with mock.patch.object(communication, "init"):
        getattr(importlib.import_module(part), "main", lambda: None)()
    print(f"{part}: {time.process_time() - begin:.0f} s of a core", flush=True)
    parts[part] = json.loads((folder / part / f"report_{rank}.json").read_text())
os.environ["REPORT_FOLDER"] = str(folder)
report(rank, parts)
# The launcher ends this process, which one that has compiled for GPU would not do without an error.
time.sleep(600)
