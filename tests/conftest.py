"""Fixtures that every test file shares."""

import gc

import mindspore as ms
import pytest
import quick_mindspore

quick_mindspore.install()

# The files that take longest. Those that share a job of several processes are one.
LONGEST = ["ranks", "test_semi_auto_parallel", "test_faults", "test_micro_size_finder", "test_failures", "test_sample"]
LONGEST += ["test_optimizers", "test_optimizers_and_schedules", "test_many_workers", "test_tutorial"]
LONGEST += ["test_micro_size_of_ranks", "test_docs", "test_packaging", "test_frozen", "test_python_decides"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Divide the tests among the processes of xdist by file, what takes longest first, so that all end together."""
    if not config.getoption("loadgroup", default=False):
        return
    groups = {item: "ranks" if hasattr(getattr(item, "module", None), "PART") else item.path.stem for item in items}
    items.sort(key=lambda item: LONGEST.index(groups[item]) if groups[item] in LONGEST else len(LONGEST))
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


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
    with quick_mindspore.restored():
        yield


@pytest.fixture
def eager(monkeypatch):
    """Run op by op, for tests that do not depend on the compiler: it takes most of their time."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setenv("MS_JIT", "0")
