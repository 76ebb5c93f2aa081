"""Jobs of several processes that test files share. What the launcher starts is no test and runs only under msrun."""

from pathlib import Path

import pytest
from launch import launch
from simulation.cuda_stubs import stand_ins
from tiers import FIRST_TIER

collect_ignore_glob = ["*_worker.py", "many_parts.py"]
PARTS = Path(__file__).with_name("many_parts.py")


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def run_parts(request, processes, root, extra):
    """Run the workers of all files that are collected, in one job: PART names a file's worker, SIZES its jobs.

    Those that compile for GPU, as `FOR_GPU` says, come last.
    """
    modules = {getattr(item, "module", None) for item in request.session.items}
    modules = [module for module in modules if processes in getattr(module, "SIZES", ())]
    for_gpu = [module for module in modules if getattr(module, "FOR_GPU", False)]
    folder = root / f"of{processes}"
    folder.mkdir()
    extra |= {"STATES": str(root / "states")}
    if for_gpu:
        extra |= request.getfixturevalue("stand_ins_for_cuda")
    # As the files are called, so that it is always the same order.
    parts = [module.PART for module in sorted(modules, key=lambda module: (module in for_gpu, module.__name__))]
    return launch(PARTS, processes, folder, limit=900, extra=extra, arguments=parts)


@pytest.fixture(scope="session")
def stand_ins_for_cuda(tmp_path_factory):
    """The environment with stand-ins for CUDA, with which MindSpore compiles for GPU."""
    return stand_ins(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def job_of_two(root, request):
    return run_parts(request, 2, root, {})


@pytest.fixture(scope="session")
def job_of_four(job_of_two, root, request):
    assert request.config.option.markexpr != FIRST_TIER, "the test is not marked as one of the second tier"
    return run_parts(request, 4, root, {})


@pytest.fixture(scope="module")
def two(job_of_two, request):
    """The reports of two processes of this file's worker."""
    return [report[request.module.PART] for report in job_of_two]


@pytest.fixture(scope="module")
def four(job_of_four, request):
    return [report[request.module.PART] for report in job_of_four]


@pytest.fixture(scope="module")
def states(root, request):
    """The folder of the states of this file's worker."""
    return root / "states" / request.module.PART
