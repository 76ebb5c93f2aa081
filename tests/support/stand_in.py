"""Modules of projects that are not installed."""

import sys
import types


def stand_in(monkeypatch, name, **contents):
    """Have a module of another project imported that has these names."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    vars(sys.modules[name]).update(contents)
