"""The shape of the package: rooms whose imports run one way, short files and functions."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ms_gradaccum"

# A room imports only from itself and from those before it.
ROOMS = (
    "_checks backend batch gradients parallel training loops checkpoint tools integrations __init__ __main__".split()
)

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file):
    return file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def imported_modules(file):
    """Full names of all that ``file`` imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}, line {node.lineno}: a relative import"
            yield from (module_of(node.module, alias.name) for alias in node.names)


def module_of(module, name):
    """The module that ``from module import name`` loads."""
    inner = f"{module}.{name}"
    return inner if is_ours(module) and PACKAGE.joinpath(*inner.split(".")[1:]).with_suffix(".py").exists() else module


def imported_files(file):
    """Names of the files of the package that ``file`` imports."""
    names = {name.partition(".")[2] or "__init__" for name in imported_modules(file) if is_ours(name)}
    return [f"{name}.__init__" if (PACKAGE / name.replace(".", "/")).is_dir() else name for name in names]


def is_ours(module):
    return module == "ms_gradaccum" or module.startswith("ms_gradaccum.")


def room_of(name):
    return ROOMS.index(name.split(".")[0])


def code_length(function):
    """Lines of a function without its docstring."""
    docstring = ast.get_docstring(function, clean=False)
    return function.end_lineno - function.lineno + 1 - len((docstring or "").splitlines())


def lines_of_code(file):
    """Number of lines with code: docstrings, comments and blank lines do not count."""
    text, docstrings = file.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type not in NO_CODE} - docstrings)


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


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_has_at_most_250_lines_of_code(file):
    assert lines_of_code(file) <= 250


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_function_has_at_most_40_lines(file):
    functions = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)]
    assert {f.name: code_length(f) for f in functions if code_length(f) > 40} == {}


def test_the_page_for_maintainers_has_the_same_rooms():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^\| `(\w+?)(?:\.py|/)` \|", page, re.M)
    assert rooms == ROOMS


def test_nothing_imports_torch():
    for file in FILES:
        assert "torch" not in {module.split(".")[0] for module in imported_modules(file)}, file
