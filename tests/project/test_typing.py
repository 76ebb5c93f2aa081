"""The types that an editor shows of the public names: precise for each argument, result and attribute."""

import functools
import importlib
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typed_sample
from stand_in import stand_in

import ms_gradaccum
from ms_gradaccum.backend.plain_state import Json
from ms_gradaccum.batch.split import BatchAxis

# The methods without a public name that programs call.
SPECIAL = "__init__ __new__ __call__ __enter__ __exit__ __iter__ __len__ __getitem__ __float__ __format__ __array__"
# Types that have themselves in them are known by name.
RECURSIVE = {"Json": Json, "BatchAxis": BatchAxis}
# Python has these from 3.11 on, like the overloads that name them. The package names them for type checkers alone.
FOR_CHECKERS = {}
if hasattr(typing, "TypeVarTuple"):
    FOR_CHECKERS = {"Unpack": typing.Unpack, "_Others": typing.TypeVarTuple("_Others")}


def modules_of_integrations(monkeypatch):
    """Import all integrations, with as much of mindformers as registers a class."""
    register = types.SimpleNamespace(register_cls=lambda cls, module_type: cls)
    kinds = types.SimpleNamespace(WRAPPER="wrapper")
    stand_in(monkeypatch, "mindformers.tools.register", MindFormerRegister=register, MindFormerModuleType=kinds)
    stand_in(monkeypatch, "mindformers.core.context.build_context", is_legacy_model=lambda: True)
    files = (Path(ms_gradaccum.__file__).parent / "integrations").glob("[a-z]*.py")
    names = sorted(f"ms_gradaccum.integrations.{file.stem}" for file in files)
    found = [importlib.import_module(name) for name in names]
    sys.modules.pop("ms_gradaccum.integrations.mindformers")
    return found


def public_items(module):
    """Return the public functions and classes that a module defines, or the package itself has."""
    if module is ms_gradaccum:
        return [getattr(module, name) for name in module.__all__]
    items = [item for name, item in vars(module).items() if name[0] != "_" and not inspect.ismodule(item)]
    return [item for item in items if getattr(item, "__module__", "") == module.__name__]


def functions_of(item):
    """Return the functions behind a public function or class by name, those that it inherits in the package too."""
    if inspect.isfunction(item):
        return {item.__qualname__: item}
    found = {}
    for owner in (each for each in item.__mro__ if each.__module__.startswith("ms_gradaccum")):
        is_named_tuple = hasattr(owner, "_field_defaults")
        for name, member in vars(owner).items():
            if name == "__new__" and is_named_tuple:
                continue  # Python has made it of the annotated fields.
            member = member.func if isinstance(member, functools.cached_property) else member
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(member) and (name in SPECIAL.split() or name[0] != "_"):
                found[f"{owner.__name__}.{name}"] = inspect.unwrap(member)
    return found


def has_any(hint):
    """Return whether an annotation has an Any in it, at any depth."""
    return hint is Any or any(map(has_any, hint if isinstance(hint, (list, tuple)) else get_args(hint)))


def faults_of(item):
    """Return what has an Any, as text; mypy finds what lacks a type."""
    faults = []
    for name, function in functions_of(item).items():
        # Python keeps the overloads of a function from 3.11 on.
        for each in (function, *getattr(typing, "get_overloads", lambda function: [])(function)):
            hints = get_type_hints(each, localns=RECURSIVE | FOR_CHECKERS)
            faults += [f"{name}: {part}" for part, hint in hints.items() if has_any(hint)]
    if inspect.isclass(item):
        own = [each for each in item.__mro__ if each.__module__.startswith("ms_gradaccum")]
        names = [name for each in own for name in vars(each).get("__annotations__", {}) if name[0] != "_"]
        hints = get_type_hints(item, localns=RECURSIVE)
        faults += [f"{item.__name__}.{name}" for name in names if has_any(hints[name])]
    return faults


def test_each_public_signature_is_precise(monkeypatch):
    modules = [ms_gradaccum, *modules_of_integrations(monkeypatch)]
    items = [item for module in modules for item in public_items(module)]
    assert len(items) > 35 and has_any(dict[str, list[Any]])
    assert [fault for item in items for fault in faults_of(item)] == []


def test_the_typed_sample_does_what_its_types_say(tmp_path):
    report = typed_sample.step_by_step(tmp_path)
    assert (report.loss, report.updated, type(report.learning_rate)) == (102.0, True, float)
    typed_sample.by_model(tmp_path / "model")
    assert typed_sample.by_loop() == 2
    typed_sample.before_a_training()
    typed_sample.settings()
