"""Fixtures that every test file shares."""

import gc

import mindspore as ms
import pytest
import quick_mindspore

quick_mindspore.install()


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
    """Leave the mode as it was, whatever a test did."""
    before = ms.get_context("mode")
    yield
    ms.set_context(mode=before)


@pytest.fixture
def eager(monkeypatch):
    """Run op by op, for tests that do not depend on the compiler: it takes most of their time."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setenv("MS_JIT", "0")
