"""The shape of the package: rooms whose imports run one way."""

import ast
import re
from pathlib import Path

import pytest
import structure
from structure import FILES, imported_files, name_of

PACKAGE = Path(__file__).parents[2] / "ms_gradaccum"

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


def test_nothing_imports_torch():
    for file in FILES:
        assert "torch" not in {module.split(".")[0] for module in structure.imported_modules(file)}, file


def private_names(file):
    """Return the private names of MindSpore that a file imports or reads from what it imports."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    aliases = [("", alias) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    aliases += [
        (f"{node.module}.", alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    aliases = [(module + alias.name, alias.asname or alias.name) for module, alias in aliases]
    imported = {name: full for full, name in aliases if full.split(".")[0] == "mindspore"}
    found = {full for full in imported.values() if "._" in full}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            full = f"{imported[node.value.id]}.{node.attr}"
            found |= {full} if re.search(r"\._(?!_)", full) else set()
    return found


def test_one_file_has_the_private_names_of_mindspore():
    assert {name_of(file) for file in FILES if private_names(file)} == {"backend.mindspore_private"}
    assert "mindspore.context._get_mode" in private_names(PACKAGE / "backend" / "mindspore_private.py")


def test_one_file_compares_names_of_devices():
    def compares(file):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Compare)]
        values = [each.value for node in nodes for each in ast.walk(node) if isinstance(each, ast.Constant)]
        return not {"CPU", "GPU", "Ascend"}.isdisjoint(values)

    assert {name_of(file) for file in FILES if compares(file)} == {"backend.device"}
