"""Fixtures that every test file shares."""

import functools
import gc
import os
from pathlib import Path

import mindspore as ms
import pytest
import quick_mindspore
import tiers
from open_window import silent_advisor

from ms_gradaccum.advice import advisor  # noqa: E402
from ms_gradaccum.training import window  # noqa: E402

quick_mindspore.install()

# The files that take longest, or the job that some of them share.
LONGEST = ["ranks", "test_faults", "test_self_test", "test_micro_size_finder", "test_sample", "test_samples"]
LONGEST += ["test_failures", "test_optimizers_and_schedules", "test_python_decides", "test_optimizers"]
LONGEST += ["test_loss_measurement", "test_frozen", "test_losses_as_written", "test_docs"]
LONGEST += ["test_networks", "test_grad_cache_windows", "test_packaging"]


# Folders of small tests of numbers, of which advice would take most of the time, and what measures the loss in them.
SILENT = {
    "backend",
    "batch",
    "checkpoint",
    "contrastive",
    "gradients",
    "integrations",
    "loops",
    "parallel",
    "training",
}
MEASURED = {"test_losses_as_written", "test_grad_clip", "test_data_sink"}
MEASURED |= {"test_loss_measurement", "test_batch_norms", "test_device_reads", "test_own_construct"}


def is_first_tier(config):
    """Return whether the first tier runs alone."""
    return config.option.markexpr == tiers.FIRST_TIER


def pytest_configure(config):
    """Try few examples of hypothesis in the first tier."""
    if is_first_tier(config):
        tiers.try_few_examples()


def pytest_ignore_collect(collection_path, config):
    """Import no file that the first tier leaves out."""
    if is_first_tier(config) and collection_path.is_relative_to(config.rootpath):
        name = collection_path.relative_to(config.rootpath).as_posix()
        return tiers.of_second_tier(name, frozenset(tiers.listed())) or None
    return None


@functools.cache
def is_about_warnings(file):
    """Return whether a file has tests of what is warned of."""
    text = Path(file).read_text()
    return "warn" in text or "told" in text


@functools.cache
def group_of(file):
    """The name of a file, or of the job of several processes that it shares with others."""
    return "ranks" if "\nfrom ranks import " in Path(file).read_text() else Path(file).stem


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each process whole files, and all that share a job to one."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return group_of(config.rootpath / nodeid.partition("::")[0])

    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the second tier, and begin with what takes longest where several processes share the tests."""
    tiers.mark(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest = {name: i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: longest.get(group_of(item.path), len(LONGEST)))


def pytest_collection_finish(session):
    """Keep what is imported out of the collections that MindSpore starts in every compilation."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=[ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["GRAPH", "PYNATIVE"])
def mode(request, monkeypatch):
    """Run the test in both execution modes, compiled even in a file that otherwise compiles nothing."""
    monkeypatch.delenv("MS_JIT", raising=False)
    ms.set_context(mode=request.param)
    return request.param


@pytest.fixture
def network_mode(mode, monkeypatch):
    """Run the test compiled and op by op, for what the network and its loss alone decide.

    What the package compiles around them is the same for all; tests of `mode` have it.
    """
    if mode == ms.PYNATIVE_MODE:
        monkeypatch.setenv("MS_JIT", "0")
        yield mode
        return
    with quick_mindspore.compiling("the network"):
        yield mode


@pytest.fixture(autouse=True)
def restored_mode():
    """Leave the mode and the seeds as they were, whatever a test did."""
    with quick_mindspore.restored():
        yield


@pytest.fixture(autouse=True)
def advice(request, monkeypatch):
    """Give trainings an Advisor that says nothing, or at least measures nothing, where no test is about that."""
    if request.path.parent.name not in SILENT or request.path.stem in MEASURED:
        return
    if is_about_warnings(request.path):
        monkeypatch.setattr(advisor, "measurement_of", lambda *_: None)
    else:
        monkeypatch.setattr(window, "Advisor", silent_advisor)


@pytest.fixture
def eager(monkeypatch):
    """Run op by op, for tests that do not depend on the compiler: it takes most of their time."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    monkeypatch.setenv("MS_JIT", "0")
