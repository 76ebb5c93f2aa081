"""Settings of MindSpore that take most of the waiting out of small tests and change no number.

The samples, which run in processes of their own, do without: they are what a user runs.
"""

import ast
import gc
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
    from mindspore.graph._parse import namespace, parser
except ImportError:  # before MindSpore 2.9
    from mindspore._extends.parse import namespace, parser
    from mindspore.common import api

_parse, _location = parser.Parser.parse, parser.Parser.get_location
_parsed = {}
# The module: its package has a function of the same name.
_seed = sys.modules["mindspore.common.seed"]


def _parse_once(self):
    code = getattr(self.fn, "__code__", None)
    if code is None:
        return _parse(self)
    if code not in _parsed:
        _parsed[code] = _parse(self), self.lines, self.line_offset, self.col_offset
    tree, self.lines, self.line_offset, self.col_offset = _parsed[code]
    return tree


def _location_once(self, node):
    places = vars(node).setdefault("places", {}) if isinstance(node, ast.AST) else {}
    place = self.filename, self.line_offset
    if place not in places:
        places[place] = _location(self, node)
    return places[place]


def _import_once(name, fromlist):
    return sys.modules.get(name) or __import__(name, fromlist=fromlist)


def install():
    """Speed up this process, and those that it starts."""
    # See ms_gradaccum/backend/device.py.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    # Otherwise threads hand each operator on to one another and spin meanwhile: an eager step takes 7 times as long.
    ms.runtime.launch_blocking()
    # Each operator would try whether two threads are faster, and the second one looks for work all the time between.
    if not RuntimeConf.get_instance().is_op_threads_num_configured():
        threads_num(1)
    # The compiler reads a function once, and its places, and writes down nothing that is not read.
    parser.Parser.parse, parser.Parser.get_location = _parse_once, _location_once
    parser.logger = SimpleNamespace(**{**vars(parser.logger), "debug": lambda *args: None})
    namespace.__import__ = _import_once
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

    def call_or_run(compiled, *tensors, record=None):
        if compiled.code.what in parts:
            return call(compiled, *tensors, record=record)
        # A gradient function that was built in GRAPH mode is compiled otherwise.
        jit = {"MS_JIT": "0"} if compiled.code.what == "the network" else {}
        if record is not None:
            record.has_run = True
        with op_by_op(), mock.patch.dict(os.environ, jit):
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
