"""The wheel and the source archive: they build, hold what they should, and work from elsewhere."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_docs import links_of

ROOT = Path(__file__).parents[2]
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "ms_gradaccum" / "__init__.py").read_text(), re.M).group(1)
PACKAGE_FILES = {file.relative_to(ROOT).as_posix() for file in (ROOT / "ms_gradaccum").rglob("*.py")}
PACKAGE_FILES |= {"ms_gradaccum/__init__.pyi", "ms_gradaccum/py.typed"}
METADATA = f"ms_gradaccum-{VERSION}.dist-info"

# Run from elsewhere and as if no extra were installed, with a loop and what needs the extras.
PROGRAM = """
import sys
sys.modules["matplotlib"] = None
from importlib.metadata import version
from pathlib import Path
import numpy as np
from mindspore import Tensor, nn
import ms_gradaccum
from ms_gradaccum import GradAccumulation, MetricsLogger, TrainOneStepCell
from ms_gradaccum.__main__ import main
network = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
x = Tensor(np.arange(1, 9, dtype=np.float32).reshape(8, 1))
loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 4)
step = TrainOneStepCell(loss_cell, nn.SGD(network.trainable_params(), 0.02))
MetricsLogger("run.jsonl", train_step=step).log(step(x, 2 * x))
print(Path(ms_gradaccum.__file__).parent)
print(version("ms_gradaccum"), ms_gradaccum.__version__)
print(f"{network.weight.asnumpy().item():.5f}")
sys.stderr = sys.stdout
print(main(["plot", "run.jsonl"]))
"""

# What follows a `#` is the error that mypy must find in the line, and in no other; pyright finds one in each of them.
# Right uses are in typed_sample.py. Nothing is wrong for them where a class of MindSpore is among the types: mypy takes
# it for an Any, and pyright for an object if `jit_class` decorates it, as it does the loss scalers.
USER = """
from mindspore import Tensor, nn

from ms_gradaccum import Accumulator, GradAccumulation, Model, StepOutput, TrainingPlan, TrainOneStepCell
from ms_gradaccum import load_state, save_state


def use(network: nn.Cell, optimizer: nn.Cell, step: TrainOneStepCell, output: StepOutput, x: Tensor) -> None:
    GradAccumulation(network, "4")  # arg-type
    TrainOneStepCell(network, optimizer, check_loss="no")  # arg-type
    TrainOneStepCell(network, optimizer, steps=2)  # call-arg
    TrainOneStepCell(network, optimizer, bad_micro_batch="ignore")  # arg-type
    output.lr  # attr-defined
    step.add_callback(print)  # arg-type
    Model(network, optimizer=optimizer, keep_batchnorm_fp32=True)  # call-arg
    Model(network, optimizer=optimizer, last_window="keep")  # arg-type
    Model(network, optimizer=optimizer, parallel=2)  # arg-type
    Accumulator(network, optimizer, 4).clip_grad_norm("1.0")  # arg-type
    name: str = TrainingPlan(dataset_size=8, batch_size=2, epochs=1).updates  # assignment
    place: str = save_state(step, "states")  # assignment
    save_state(step, "states", extra={"output": {1, 2}})  # dict-item
    updates: int = load_state(step, "states").extra["updates"]  # assignment
"""


def run(*command, cwd, expected=0, **environment):
    """Run Python without what this process sees of the checkout, and return what it prints and what it warns of."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    command = [sys.executable, *map(str, command)]
    result = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == expected, result.stdout + result.stderr
    return result.stdout, result.stderr


def build(sources, folder, *kind, **environment):
    """Build into ``folder`` and return what it holds, by suffix."""
    command = ["-m", "build", "--no-isolation", *kind, "--outdir", folder, sources]
    said = "".join(run(*command, cwd=folder.parent, **environment))
    assert "warning" not in said.lower(), said
    return {file.suffix: file for file in folder.iterdir()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources, so that nothing is left in the checkout."""
    sources = tmp_path_factory.mktemp("packages") / "sources"
    files = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", *PACKAGE_FILES]
    files = [ROOT / file for file in files] + [*ROOT.glob("tests/**/*.py")]
    for file in files:
        copy = sources / file.relative_to(ROOT)
        if file.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return sources


@pytest.fixture(scope="module")
def wheel(sources):
    return build(sources, sources.parent / "wheel", "--wheel")[".whl"]


@pytest.fixture(scope="module")
def archive(sources):
    """The source archive, and the wheel that comes of it: what `build` makes if not told otherwise."""
    return build(sources, sources.parent / "archive")


@pytest.fixture(scope="module")
def site(archive, sources):
    """The environment in which the wheel of the source archive is installed."""
    site = sources.parent / "site"
    run("-m", "pip", "install", "--no-deps", "--quiet", "--target", site, archive[".whl"], cwd=sources.parent)
    return site


def contents(wheel):
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_wheel_holds_the_package_and_the_licence_and_nothing_else(wheel):
    names = contents(wheel)
    assert PACKAGE_FILES == {name for name in names if name.startswith("ms_gradaccum/")}
    assert names[f"{METADATA}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert {name.split("/")[0] for name in names} == {"ms_gradaccum", METADATA}
    assert wheel.name == f"ms_gradaccum-{VERSION}-py3-none-any.whl"


def test_the_source_archive_holds_what_the_wheel_is_built_of(archive):
    with tarfile.open(archive[".gz"]) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
    own = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
    made = {name for name in names if name.startswith("ms_gradaccum.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == own | PACKAGE_FILES


def test_the_wheel_of_the_source_archive_is_that_of_the_sources(wheel, archive):
    assert archive[".whl"].name == wheel.name
    assert contents(archive[".whl"]) == contents(wheel)


def metadata_of(wheel):
    return email.message_from_bytes(contents(wheel)[f"{METADATA}/METADATA"])


def test_links_of_the_description_lead_to_the_published_files_of_the_version(sources, wheel):
    url = "https://host.invalid/owner/ms_gradaccum"
    published = metadata_of(build(sources, sources.parent / "published", "--wheel", MS_GRADACCUM_URL=url + "/")[".whl"])
    links = links_of((ROOT / "README.md").read_text())
    inside = [link for link in links if "://" not in link]
    kinds = [link.endswith(".png") for link in inside]
    assert {True, False} == set(kinds)
    wanted = [f"{url}/{'raw' if kind else 'blob'}/v{VERSION}/{link}" for link, kind in zip(inside, kinds)]
    assert [link for link in links_of(published.get_payload()) if link.startswith(url)] == wanted
    assert {f"Source, {url}", f"Issues, {url}/issues"} < set(published.get_all("Project-URL"))
    # Without an address there is none to lead to.
    plain = metadata_of(wheel)
    assert links_of(plain.get_payload()) == [link for link in links if "://" in link]
    assert plain.get_all("Project-URL") is None and plain.get_payload().startswith("# ms_gradaccum")


def test_what_is_installed_trains_from_elsewhere_and_says_how_to_get_the_extras(site, tmp_path):
    program = tmp_path / "program.py"  # GRAPH mode reads the source again and needs it in a file
    program.write_text(PROGRAM)
    said, _ = run(program, cwd=tmp_path, PYTHONPATH=str(site))
    path, version, weight, plot, status = said.splitlines()[-5:]
    place = str(site / "ms_gradaccum")
    assert (path, version, weight, status) == (place, f"{VERSION} {VERSION}", "2.04000", "2")
    assert plot.endswith(" Install it with: pip install matplotlib.")


@pytest.fixture(scope="module")
def typed(site):
    """A folder with a program of wrong and right uses and one of right uses alone, outside of the checkout."""
    typed = site.parent / "typed"
    typed.mkdir()
    (typed / "user.py").write_text(USER)
    shutil.copy(ROOT / "tests" / "project" / "typed_sample.py", typed)
    # Of most constructors of cells pyright believes that they may be None: MindSpore's decorator has a bare `return`.
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(site)], "reportOptionalCall": False}
    (typed / "pyrightconfig.json").write_text(json.dumps(settings | {"include": ["*.py"]}))
    return typed


def wrong_lines():
    lines = enumerate(USER.splitlines(), 1)
    return [(number, line.partition("  # ")[2]) for number, line in lines if "  # " in line]


def test_mypy_tells_right_uses_of_what_is_installed_from_wrong_ones(site, typed):
    files = ("user.py", "typed_sample.py")
    command = ["-m", "mypy", "--strict", "--ignore-missing-imports", "--cache-dir", typed / "cache", *files]
    said, _ = run(*command, cwd=typed, expected=1, PYTHONPATH=str(site))
    found = re.findall(r"^(\w+).py:(\d+): error: .*\[([a-z-]+)\]$", said, re.M)
    assert found == [("user", str(number), error) for number, error in wrong_lines()], said


@pytest.mark.skipif(find_spec("basedpyright") is None, reason="basedpyright, which is in the group 'test', is missing")
def test_pyright_tells_right_uses_of_what_is_installed_from_wrong_ones(typed):
    said, _ = run("-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, cwd=typed, expected=1)
    found = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in json.loads(said)["generalDiagnostics"]
    ]
    assert found == [("user.py", number) for number, _ in wrong_lines()], said
