"""Jobs of several processes that test files share."""

import os
import shutil
from unittest import mock

import many_parts
import pytest
import ranks
from simulation.cuda_stubs import stand_ins
from tiers import FIRST_TIER

from ms_gradaccum.tools.processes import EndedError, Job

collect_ignore_glob = ["*_worker.py", "many_parts.py"]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def run_parts(request, processes, root):
    """Run the tests `on_ranks` of all files that are collected, in one job.

    Those that compile for GPU, as `FOR_GPU` says, come last.
    """
    modules = {item.module for item in request.session.items if hasattr(item, "module")}
    modules = [module for module in modules if ranks.tests_of(module.__name__, processes)]
    for_gpu = [module for module in modules if hasattr(module, "FOR_GPU")]
    extra = request.getfixturevalue("stand_ins_for_cuda") if for_gpu else {}
    # As the files are called, so that it is always the same order.
    parts = [module.__name__ for module in sorted(modules, key=lambda module: (module in for_gpu, module.__name__))]
    folder = root / f"of{processes}"
    with mock.patch.dict(os.environ, extra), Job(processes, many_parts.run, parts, folder, root / "states") as job:
        try:
            return job.wait(900)
        except (EndedError, TimeoutError) as error:
            raise RuntimeError(f"{error!r}: {job.last_words()}") from error
        finally:
            shutil.copytree(job.folder / "log", folder / "log")


@pytest.fixture(scope="session")
def stand_ins_for_cuda(tmp_path_factory):
    return stand_ins(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def job_of_two(root, request):
    return run_parts(request, 2, root)


@pytest.fixture(scope="session")
def job_of_four(job_of_two, root, request):
    assert request.config.option.markexpr != FIRST_TIER, "the test is not marked as one of the second tier"
    return run_parts(request, 4, root)


@pytest.fixture(scope="module")
def two(job_of_two, request):
    return [report[request.module.__name__] for report in job_of_two]


@pytest.fixture(scope="module")
def four(job_of_four, request):
    return [report[request.module.__name__] for report in job_of_four]


@pytest.fixture(scope="module")
def states(root, request):
    return root / "states" / request.module.__name__
