"""Run a sample that is one program."""

import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import mindspore as ms
import pytest
from quick_mindspore import restored
from sample_process import SAMPLES


def run_program(name, *arguments, folder, **variables):
    """Run a sample's train.py and return the lines that it prints.

    It runs in this process: most of them train in less time than a new process takes to import MindSpore.
    """
    path = SAMPLES / name / "train.py"
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(sys.modules), restored():
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.setattr(sys, "path", [str(path.parent), *sys.path])
        for variable, value in variables.items():
            patch.setenv(variable, value)
        # Of one process it can be chosen once.
        patch.setattr(ms, "set_device", lambda *target: None)
        with redirect_stdout(StringIO()) as printed:
            runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue().splitlines()
