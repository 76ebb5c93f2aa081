"""The wheel: it builds, holds what it should, and works from elsewhere."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M).group(1)


def run(*command, cwd):
    result = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    files = ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
    files += [str(file.relative_to(ROOT)) for file in (ROOT / "ms_gradaccum").rglob("*") if file.is_file()]
    for file in files:
        (sources / file).parent.mkdir(parents=True, exist_ok=True)
        (sources / file).write_bytes((ROOT / file).read_bytes())
    pip_wheel = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", "."]
    run(*pip_wheel, "./sources", cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_holds_the_package_and_the_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    sources = {file.relative_to(ROOT).as_posix() for file in (ROOT / "ms_gradaccum").rglob("*.py")}
    assert sources | {"ms_gradaccum/py.typed"} == {n for n in names if n.startswith("ms_gradaccum/")}
    metadata = f"ms_gradaccum-{VERSION}.dist-info"
    assert f"{metadata}/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {"ms_gradaccum", metadata}


def test_the_installed_wheel_works_from_elsewhere(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run("-m", "pip", "install", "--no-deps", "--quiet", "--target", str(site), str(wheel), cwd=tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
from importlib.metadata import version
from pathlib import Path
import ms_gradaccum
print(Path(ms_gradaccum.__file__).parent)
print(version("ms_gradaccum"))
print(ms_gradaccum.GradAccumulation.__module__)
"""
    lines = run("-c", program, cwd=elsewhere).splitlines()
    assert lines[-3:] == [str(site / "ms_gradaccum"), VERSION, "ms_gradaccum.grad_accumulation"]
