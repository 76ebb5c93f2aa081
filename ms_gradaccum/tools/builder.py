"""The function that builds a training, and how a new process imports and calls it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mindspore as ms

from ms_gradaccum._checks import argument_error, typed

# The module name of an imported file. It is not "__main__", so that guarded code does not run.
_FILE_MODULE = "__mp_main__"
_RULE = "a function that a new process can import"
_REMEDY = "Define it with def at the top level of a file, or give its place: 'train.py:build' or 'module:build'."


class Builder(NamedTuple):
    """The data that a new process needs to call a function as this process would."""

    # The absolute path of a file or the name of a module, and the name of the function in it.
    place: str
    name: str
    argv: list[str]
    mode: int
    device: list[Any]
    # The class name used in error messages.
    owner: str

    @staticmethod
    def of(owner: str, build: Any) -> "Builder":
        """Return the Builder of ``build``, a function or a string such as 'train.py:build', or raise."""
        place, name = _parse(owner, build) if isinstance(build, str) else _locate(owner, build)
        # The arguments of this program are for its own functions. A function of another program sees none.
        argv = [place] if isinstance(build, str) else sys.argv
        return Builder(place, name, argv, ms.get_context("mode"), _device(), owner)

    def call(self) -> Any:
        """Import the function, call it in the mode and on the device of the caller, and return its result."""
        sys.argv[:] = self.argv
        ms.set_context(mode=self.mode)
        # A device can be set only once, so the default one is not set: the function may choose another.
        if self.device != _device():
            ms.set_device(*self.device)
        module = _import_file(self.place) if "/" in self.place else importlib.import_module(self.place)
        build = _attribute(module, self.name)
        if not callable(build):
            rule = f"the name of a function of {self.place}"
            raise ValueError(
                argument_error(self.owner, "build", rule, repr(self.name), "It is called without arguments.")
            )
        return build()


def _device() -> list[Any]:
    """Return the arguments of `set_device` for the device of this process."""
    target = ms.get_context("device_target")
    return [target] if target == "CPU" else [target, ms.get_context("device_id")]


def _parse(owner: str, text: str) -> tuple[str, str]:
    place, _, name = text.rpartition(":")
    if not place or not name:
        rule = "a function, 'file.py:function' or 'module:function'"
        raise ValueError(argument_error(owner, "build", rule, repr(text), "For example 'train.py:build'."))
    return (str(Path(place).resolve()) if place.endswith(".py") else place), name


def _locate(owner: str, build: Any) -> tuple[str, str]:
    """Return the file or module of a function and its name there. Raise unless this leads to the same function."""
    if not callable(build):
        raise TypeError(argument_error(owner, "build", _RULE, typed(build), _REMEDY))
    place, name = getattr(build, "__module__", None), getattr(build, "__qualname__", None)
    module = sys.modules.get(place or "")
    if module is None or name is None or _attribute(module, name) is not build:
        raise ValueError(argument_error(owner, "build", _RULE, repr(build), _REMEDY))
    if place == "__main__":
        # Only `python -m package.program` has a spec; a program that is started by its path, or a notebook, has none.
        spec = getattr(module, "__spec__", None)
        place = spec.name if spec is not None else str(Path(getattr(module, "__file__", "")).resolve())
        if spec is None and not Path(place).is_file():
            raise ValueError(argument_error(owner, "build", _RULE, f"{name} of a program that is in no file", _REMEDY))
    return str(place), name


def _attribute(module: ModuleType, name: str) -> Callable[..., Any] | None:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found  # type: ignore[no-any-return]


def _import_file(path: str) -> ModuleType:
    """Import a file outside of packages, with its folder first in the module search path."""
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_loader(_FILE_MODULE, SourceFileLoader(_FILE_MODULE, path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # MindSpore's compiler looks up the globals of a function in the module of this name.
    sys.modules[_FILE_MODULE] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module
