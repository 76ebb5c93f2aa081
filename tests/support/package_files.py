"""The files of the package, what each of them imports, and which functions are called."""

import ast
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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


@contextmanager
def seen() -> Iterator[list[tuple[str, str]]]:
    """Give the file and the name of each function of the package that is called inside this context."""
    calls: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            calls.append((frame.f_code.co_filename, f"{frame.f_code.co_name}:{frame.f_code.co_firstlineno}"))

    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def files_in(calls: list[tuple[str, str]]) -> set[str]:
    return {file for file, _ in calls}


def counts_of(calls: list[tuple[str, str]]) -> tuple[int, int, int, int]:
    """Return the numbers of files, functions and calls, and how often a call is in another file than the one before."""
    changes = sum(one[0] != other[0] for one, other in itertools.pairwise(calls))
    return len(files_in(calls)), len(set(calls)), len(calls), changes
