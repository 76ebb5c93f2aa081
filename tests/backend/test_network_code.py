"""What is found of the code of a network, wherever a program keeps it."""

import functools
import json
import types

import pytest
from mindspore import nn, ops
from mindspore.common._grad_function import _Function

from ms_gradaccum.backend.network_code import NetworkCode, _is_standard, _is_users


class Net(nn.Cell):
    """A network that takes what a test gives it."""

    def __init__(self, held=None):
        super().__init__()
        self.dense, self.held = nn.Dense(2, 2), held

    def construct(self, x):
        return self.dense(x)


def hooking(x):
    x.register_hook(lambda gradient: gradient.clip(-1, 1))
    return x


def doubled(x):
    return 2 * x


CLIP = ops.InsertGradientOf(doubled)
TABLE = {"hook": hooking, "double": doubled}


def module(name, **values):
    made = types.ModuleType(name)
    vars(made).update(__file__=f"{name}.py", **values)
    return made


# Names that are none of this module's.
MODULE = module("users_hooks", hook_there=hooking, double_there=doubled)
PACKAGE = module("users_package", inner=MODULE)


class Helper:
    """An object that is no cell."""

    function = staticmethod(doubled)

    def hook(self, x):
        return hooking(x)


class OfSlots:
    __slots__ = ("function",)

    def __getattr__(self, name):
        raise RuntimeError(name)


class Odd:
    """Says that it is something else, and fails when asked what it has."""

    @property
    def __class__(self):
        raise RuntimeError("no class")

    def __getattr__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


class Backward(nn.Cell):
    def construct(self, x):
        return x

    def bprop(self, x, out, grad):
        return (grad,)


class OwnFunction(_Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def calling(text):
    """Return a network whose ``construct`` evaluates a text with this module's names."""

    class Calls(Net):
        pass

    exec(f"def construct(self, x):\n    return {text}", globals(), space := {})
    Calls.construct = space["construct"]
    return Calls()


@functools.lru_cache
def cached(x):
    return hooking(x)


def around(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


WITH_HOOK = {
    "a function": lambda: calling("hooking(x)"),
    "a function's function": lambda: calling("around(hooking)(x)"),
    "a module's function": lambda: calling("MODULE.hook_there(x)"),
    "a package's function": lambda: calling("PACKAGE.inner.hook_there(x)"),
    "by getattr": lambda: calling("getattr(MODULE, 'hook_there')(x)"),
    "an operator": lambda: calling("CLIP(x)"),
    "a dict": lambda: calling("TABLE['hook'](x)"),
    "a method": lambda: calling("Helper().hook(x)"),
    "a cell made in construct": lambda: calling("Backward()(x)"),
    "a function of MindSpore's kind": lambda: calling("OwnFunction.apply(x)"),
    "a cached function": lambda: calling("cached(x)"),
    "a partial": lambda: Net(functools.partial(hooking)),
    "a partial of a method": lambda: Net([functools.partial(Helper().hook)]),
    "a bound method": lambda: Net(Helper().hook),
    "a helper": lambda: Net(Helper()),
    "a set": lambda: Net({hooking}),
    "a compiled function": lambda: Net(around(hooking)),
    "a cell in a list": lambda: Net([Backward()]),
    "a cell in a helper": lambda: Net(types.SimpleNamespace(inner=[Net(), Backward()])),
    "a hook of a hidden cell": lambda: Net([hooked_cell()]),
}


def hooked_cell():
    cell = Net()
    cell.register_backward_hook(lambda cell, grad_input, grad_output: None)
    return cell


@pytest.mark.parametrize("name", WITH_HOOK)
def test_a_backward_pass_of_its_own_is_found(name):
    assert NetworkCode(WITH_HOOK[name]()).has_own_backward()


def recomputed():
    cell = Net()
    cell.dense.recompute()
    return cell


def slots():
    helper = OfSlots()
    helper.function = doubled
    return helper


def endless():
    items = [1, 2]
    items.append(items)
    return items


WITHOUT = {
    "none": Net,
    "a module's other function": lambda: calling("MODULE.double_there(x)"),
    "a helper's other function": lambda: Net(Helper.function),
    "MindSpore's own": recomputed,
    "odd attributes": lambda: Net({"odd": Odd(), "class": Odd, "in another": types.SimpleNamespace(odd=Odd())}),
    "slots": lambda: Net([slots()]),
    "a list that has itself": lambda: Net(endless()),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_where_there_is_none_there_is_none(name):
    assert not NetworkCode(WITHOUT[name]()).has_own_backward()


def test_installed_packages_are_users_code_wherever_python_puts_them():
    library = functools.__file__.rpartition("/")[0]
    assert _is_standard(f"{library}/functools.py") and not _is_users(functools.wraps)
    assert not _is_standard(f"{library}/site-packages/layers/hooks.py")
    assert not _is_standard(f"{library}/dist-packages/layers/hooks.py")


def test_functions_of_the_standard_library_are_not_followed_but_what_they_are_given_is():
    code = NetworkCode(calling("json.dumps(x) and functools.reduce(doubled, x)"))
    assert doubled in code.functions
    assert not any(function.__globals__ is vars(json) for function in code.functions)
