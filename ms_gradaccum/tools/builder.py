"""The function that builds a training: its place, and how a new process imports and calls it."""

import importlib
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mindspore as ms

from ms_gradaccum.backend.device import arguments_of_set_device

# The module name of an imported file. It is not "__main__", so that guarded code does not run.
_FILE_MODULE = "__mp_main__"
_RULE = "a function that a new process can import"
_REMEDY = (
    "Define it with def at the top level of a file, or give its place: 'train.py:build' or "
    "'module:build'."
)


def _sentence(got: str, remedy: str = _REMEDY, rule: str = _RULE) -> str:
    return f"For 'find_micro_size', the argument 'build' must be {rule}, but got {got}. {remedy}"


class Builder(NamedTuple):
    """The data that a new process needs to call a function as this process would."""

    # The absolute path of a file or the name of a module, and the name of the function in it.
    place: str
    name: str
    argv: list[str]
    mode: int
    device: list[str | int]

    @staticmethod
    def of(build: object) -> "Builder":
        """Return the Builder of ``build``, a function or a string such as 'train.py:build', or raise."""
        if isinstance(build, str):
            place, name = _parse(build)
            # The arguments of this program are only for its own functions.
            argv = [place]
        else:
            place, name = _locate(build)
            argv = sys.argv
        return Builder(place, name, argv, ms.get_context("mode"), arguments_of_set_device())

    def call(self) -> Any:
        """Import the function, call it in the mode and on the device of the caller, and return its result."""
        sys.argv[:] = self.argv
        ms.set_context(mode=self.mode)
        # A device can be set only once. So the default device is not set, because the function may choose another.
        if self.device != arguments_of_set_device():
            ms.set_device(*self.device)
        try:
            if "/" in self.place:
                module = _import_file(self.place)
            else:
                module = importlib.import_module(self.place)
        except ModuleNotFoundError as error:
            got = f"'{self.place}:{self.name}' without the module {error.name}"
            raise ValueError(
                _sentence(got, "Install it, or add its folder to PYTHONPATH.")
            ) from error
        build = _attribute(module, self.name)
        if not callable(build):
            rule = f"the name of a function of {self.place}"
            raise ValueError(_sentence(repr(self.name), "It is called without arguments.", rule))
        return build()


def _parse(text: str) -> tuple[str, str]:
    place, _, name = text.rpartition(":")
    if not place or not name:
        rule = "a function, 'file.py:function' or 'module:function'"
        raise ValueError(_sentence(repr(text), "For example 'train.py:build'.", rule))
    if not place.endswith(".py"):
        return place, name
    file = Path(place).resolve()
    if not file.is_file():
        raise ValueError(
            _sentence(f"{text!r}, whose file is not there", f"It is looked for at {file}.")
        )
    return str(file), name


def _locate(build: object) -> tuple[str, str]:
    """Return the file or module of a function, and its name there. Raise unless they lead to the same function."""
    if not callable(build):
        raise TypeError(_sentence(f"{build!r} of type {type(build).__name__}"))
    place = getattr(build, "__module__", "")
    name = getattr(build, "__qualname__", "")
    module = sys.modules.get(place)
    if module is None or _attribute(module, name) is not build:
        raise ValueError(_sentence(repr(build)))
    if place != "__main__":
        return place, name
    # Only `python -m package.program` has a spec; a program that is started by its path and a notebook have none.
    if module.__spec__ is not None:
        return module.__spec__.name, name
    file = Path(getattr(module, "__file__", "")).resolve()
    if not file.is_file():
        raise ValueError(_sentence(f"{name} of a program that is in no file"))
    return str(file), name


def _attribute(found: object, name: str) -> object:
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _import_file(path: str) -> ModuleType:
    """Import a file outside of packages, with its folder first in the module search path."""
    sys.path.insert(0, str(Path(path).parent))
    # MindSpore's compiler looks up the globals of a function in the module of this name.
    module = sys.modules[_FILE_MODULE] = ModuleType(_FILE_MODULE)
    module.__file__ = path
    SourceFileLoader(_FILE_MODULE, path).exec_module(module)
    return module
