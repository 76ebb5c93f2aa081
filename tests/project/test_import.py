"""`import ms_gradaccum` loads what is used, and names are found as in any other package."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import ms_gradaccum

# At first it was 115 modules, of which 44 were tools.
MOST = 45
COUNT = """
import sys
import ms_gradaccum
print(sum(name.startswith("ms_gradaccum") for name in sys.modules))
from ms_gradaccum import GradAccumulation, Model, TrainOneStepCell
assert not [name for name in sys.modules if name.startswith("ms_gradaccum.tools.")]
ms_gradaccum.verify
assert "ms_gradaccum.tools.verification.verify" in sys.modules
"""


def test_the_package_loads_few_modules_and_no_tools_until_one_is_used():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= MOST


def test_type_checkers_see_the_names_that_python_finds():
    tree = ast.parse(Path(ms_gradaccum.__file__).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("ms_gradaccum.")
        for alias in node.names
    }
    assert seen == {name: f"ms_gradaccum.{module}" for name, module in ms_gradaccum._MODULES.items()}
    assert dir(ms_gradaccum) == sorted(seen)


@pytest.mark.parametrize("name", ms_gradaccum.__all__)
def test_a_name_is_found_once_and_pickled(name):
    found = getattr(ms_gradaccum, name)
    assert vars(ms_gradaccum)[name] is found
    assert pickle.loads(pickle.dumps(found)) is found


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ms_gradaccum' has no attribute 'Nothing'"):
        ms_gradaccum.Nothing  # noqa: B018
