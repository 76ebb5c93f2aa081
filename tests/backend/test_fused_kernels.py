"""Windows give the same with MindSpore's graph kernel fusion, set as docs/performance.md says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "fused_program.py"


@pytest.mark.skipif(shutil.which("g++") is None, reason="MindSpore needs g++ to fuse kernels on CPU")
def test_windows_of_fused_kernels_give_what_others_give(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[2]), "MS_COMPILER_CACHE_PATH": str(tmp_path)}
    command = [sys.executable, PROGRAM]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    fused = [path.name for path in tmp_path.glob("akg_kernel_meta/*.so")]
    assert any("Tanh" in name for name in fused) and not any("AssignAdd" in name for name in fused)
