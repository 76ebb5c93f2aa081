"""Gradient accumulation for MindSpore."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.3.0"


def _public_names() -> dict[str, str]:
    """Return the module of each public name. `__init__.pyi`, which type checkers read, imports them."""
    stub = Path(__file__).with_suffix(".pyi").read_text()
    modules = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.name: str(node.module) for alias in node.names}
    return modules


_MODULES = _public_names()
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
