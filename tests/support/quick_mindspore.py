"""Settings of MindSpore that take most of the waiting out of small tests and change no number.

The samples, which run in processes of their own, do without: they are what a user runs.
"""

import gc
import inspect
import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import mindspore as ms
import mindspore.dataset as ds
from mindspore._c_expression import RuntimeConf
from mindspore.device_context.cpu.op_tuning import threads_num

try:
    from mindspore.graph import api
    from mindspore.graph._parse import parser
except ImportError:  # before MindSpore 2.9
    from mindspore._extends.parse import parser
    from mindspore.common import api

_read = inspect.getsourcelines
_lines = {}
_comments = parser.Parser.get_jit_comments
# The module: its package has a function of the same name.
_seed = sys.modules["mindspore.common.seed"]


def _read_once(thing):
    code = getattr(thing, "__code__", None)
    if code is None:
        return _read(thing)
    if code not in _lines:
        _lines[code] = _read(thing)
    return _lines[code]


def _comments_if_any(self, first, last):
    """Look at the lines of each node of a function only where one of them can be such a comment."""
    if not hasattr(self, "may_comment"):
        self.may_comment = any("@jit" in line for line in self.lines)
    return _comments(self, first, last) if self.may_comment else []


def install():
    """Speed up this process, and those that it starts."""
    # See ms_gradaccum/backend/cpu.py.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    # Otherwise threads hand each operator on to one another and spin meanwhile: an eager step takes 7 times as long.
    ms.runtime.launch_blocking()
    # Each operator would try whether two threads are faster, and the second one looks for work all the time between.
    if not RuntimeConf.get_instance().is_op_threads_num_configured():
        threads_num(1)
    # The compiler reads the source of a function once, not in each compilation: an eighth of its time.
    inspect.getsourcelines = _read_once
    parser.Parser.get_jit_comments = _comments_if_any
    # Each compilation collects garbage. What is young is enough; Python itself looks at the rest now and then, but not
    # at what is imported.
    api.gc = SimpleNamespace(collect=lambda: gc.collect(1))
    gc.freeze()


@contextmanager
def eagerly():
    """Run everything op by op: compiling takes nearly all the time of a test that is not about it."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        with mock.patch.dict(os.environ, MS_JIT="0"):
            yield
    finally:
        ms.set_context(mode=before)


@contextmanager
def compiling(*parts):
    """Compile only these parts of a step, by the names that errors have for it; run the rest op by op."""
    from ms_gradaccum.backend.compiled import Compiled, op_by_op  # The package may still be to be imported.

    call = Compiled.__call__

    def call_or_run(compiled, *tensors):
        if compiled.what in parts:
            return call(compiled, *tensors)
        with op_by_op():
            return compiled.cell(*tensors)

    with mock.patch.object(Compiled, "__call__", call_or_run):
        yield


@contextmanager
def restored():
    """Leave the mode and the seeds as they were, whatever is done meanwhile."""
    before = ms.get_context("mode")
    # There is no public way to unset a seed.
    seed, data_seed = _seed._GLOBAL_SEED, ds.config.get_seed()
    try:
        yield
    finally:
        ms.set_context(mode=before)
        _seed._GLOBAL_SEED = seed
        ds.core.config._config.set_seed(data_seed)
