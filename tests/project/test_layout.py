"""The shape of the package: rooms whose imports run one way."""

import ast
import re

import pytest
from package_files import FILES, PACKAGE, imported_files, name_of

# A room imports only from itself and from those before it.
ROOMS = ["_checks", "backend", "batch", "gradients", "parallel", "advice", "training"]
ROOMS += ["static_graph", "loops", "checkpoint", "tools", "contrastive", "integrations", "__init__", "__main__"]


def room_of(name):
    return ROOMS.index(name.split(".")[0])


def test_each_entry_of_the_package_is_a_room():
    entries = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert entries == set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_room_imports_only_from_those_before_it(file):
    name = name_of(file)
    assert [other for other in imported_files(file) if room_of(other) > room_of(name)] == []


def test_there_is_no_import_cycle():
    imports = {name_of(file): set(imported_files(file)) for file in FILES}
    assert sum(map(len, imports.values())) > 100
    while imports:
        free = [name for name, others in imports.items() if not others & imports.keys()]
        assert free, f"a cycle among {sorted(imports)}"
        for name in free:
            del imports[name]


def test_the_page_for_maintainers_has_the_same_rooms():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^\| `(\w+?)(?:\.py|/)` \|", page, re.M)
    assert rooms == ROOMS


# In an import, and behind a name under which MindSpore or a part of it is imported.
PRIVATE = re.compile(
    r"^\s*(from|import) mindspore\S*\._[a-z]|^\s*from mindspore\S* import .*\b_[a-z]"
    r"|\b(ms|mindspore|nn|ops|mint)(\.\w+)*\._[a-z]",
    re.M,
)


def test_one_file_has_the_private_names_of_mindspore():
    assert {name_of(file) for file in FILES if PRIVATE.search(file.read_text())} == {"backend.mindspore_private"}


def test_one_file_compares_names_of_devices():
    def compares(file):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Compare)]
        values = [each.value for node in nodes for each in ast.walk(node) if isinstance(each, ast.Constant)]
        return not {"CPU", "GPU", "Ascend"}.isdisjoint(values)

    assert {name_of(file) for file in FILES if compares(file)} == {"backend.device"}
