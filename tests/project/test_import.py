"""`import ms_gradaccum` loads what is used, and names are found as in any other package."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import ms_gradaccum

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
    assert int(done.stdout) <= 45  # At first it was 115 modules, of which 44 were tools.


def test_type_checkers_see_the_names_that_python_finds():
    tree = ast.parse(Path(ms_gradaccum.__file__).with_suffix(".pyi").read_text())
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    # In a stub, only `name as name` is a name of the package itself.
    assert all(alias.asname == alias.name for alias in aliases)
    names = sorted(alias.name for alias in aliases)
    assert "Model" in names and dir(ms_gradaccum) == sorted(ms_gradaccum.__all__) == names


@pytest.mark.parametrize("name", ms_gradaccum.__all__)
def test_a_name_is_found_once_and_pickled(name):
    found = getattr(ms_gradaccum, name)
    assert vars(ms_gradaccum)[name] is found
    assert pickle.loads(pickle.dumps(found)) is found


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ms_gradaccum' has no attribute 'Nothing'"):
        ms_gradaccum.Nothing  # noqa: B018
