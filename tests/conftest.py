"""Fixtures that every test file shares."""

import gc
import sys

import mindspore as ms
import mindspore.dataset as ds
import pytest
import quick_mindspore

quick_mindspore.install()
# The module: its package has a function of the same name.
_SEED = sys.modules["mindspore.common.seed"]


def pytest_collection_finish(session):
    """Keep what is imported out of the collections that MindSpore starts in every compilation."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["GRAPH", "PYNATIVE"])
def mode(request, monkeypatch):
    """Run the test in both execution modes, compiled even in a file that otherwise compiles nothing."""
    monkeypatch.delenv("MS_JIT", raising=False)
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=before)


@pytest.fixture(autouse=True)
def restored_mode():
    """Leave the mode and the seeds as they were, whatever a test did."""
    before = ms.get_context("mode")
    # There is no public way to unset a seed.
    seed, data_seed = _SEED._GLOBAL_SEED, ds.config.get_seed()
    yield
    ms.set_context(mode=before)
    _SEED._GLOBAL_SEED = seed
    ds.core.config._config.set_seed(data_seed)


@pytest.fixture
def eager(monkeypatch):
    """Run op by op, for tests that do not depend on the compiler: it takes most of their time."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setenv("MS_JIT", "0")
