"""As many processes as a machine with eight devices has."""

from pathlib import Path

import numpy as np
import pytest
from launch import launch
from scenarios import whole_batches


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return launch(Path(__file__).with_name("many_worker.py"), 8, tmp_path_factory.mktemp("eight"), limit=180)


@pytest.mark.parametrize("kind", ["DataParallel", "HSDP"])
def test_eight_processes_train_like_one_on_all_rows(kind, eight):
    # 12 rows: two for some processes, one for others
    assert len({report[kind]["fingerprint"] for report in eight}) == 1
    np.testing.assert_allclose(eight[0][kind]["weights"], whole_batches("Adam", ((0,), (1,))), rtol=2e-5, atol=2e-6)
