"""The files of the package, and what each of them imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ms_gradaccum"
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def imported_modules(file: Path) -> Iterator[str]:
    """Yield the full names of all that ``file`` imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file.name}, line {node.lineno}: a relative import"
            yield from (_module_of(node.module, alias.name) for alias in node.names)


def imported_files(file: Path) -> list[str]:
    """Return the names of the files of the package that ``file`` imports."""
    names = {name.partition(".")[2] or "__init__" for name in imported_modules(file) if _is_ours(name)}
    return [f"{name}.__init__" if (PACKAGE / name.replace(".", "/")).is_dir() else name for name in names]


def _module_of(module: str, name: str) -> str:
    inner = f"{module}.{name}"
    is_file = PACKAGE.joinpath(*inner.split(".")[1:]).with_suffix(".py").exists()
    return inner if _is_ours(module) and is_file else module


def _is_ours(module: str) -> bool:
    return module == "ms_gradaccum" or module.startswith("ms_gradaccum.")
