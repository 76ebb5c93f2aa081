"""Searches in the code of a network, wherever a program keeps it."""

import functools
import json
import types

import pytest
from mindspore import mint, nn, ops
from mindspore.common._grad_function import _Function
from strategies import endless

from ms_gradaccum.backend.network_code import NetworkCode, is_user
from ms_gradaccum.parallel import factory


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
    function = staticmethod(doubled)

    def hook(self, x):
        return hooking(x)


class Backward(nn.Cell):
    def construct(self, x):
        return x

    def bprop(self, x, out, grad):
        return (grad,)


class WithCell:
    cell = Backward()


def with_default(x, function=hooking):
    return function(x)


def with_keyword(x, *, function=hooking):
    return function(x)


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
    "an operator of a cell": lambda: Net(ops.HookBackward(doubled)),
    "a dict": lambda: calling("TABLE['hook'](x)"),
    "a method": lambda: calling("Helper().hook(x)"),
    "a cell made in construct": lambda: calling("Backward()(x)"),
    "a function of MindSpore's kind": lambda: calling("OwnFunction.apply(x)"),
    "a partial": lambda: Net(functools.partial(hooking)),
    "a cell": lambda: Net(Backward()),
    "a cell in a list": lambda: Net([Backward()]),
    "a cell in a helper": lambda: Net(types.SimpleNamespace(inner=[Net(), Backward()])),
    "a hook of a hidden cell": lambda: Net([hooked_cell()]),
    "a class's cell": lambda: Net(WithCell()),
    "a default": lambda: calling("with_default(x)"),
    "a default of a keyword": lambda: calling("with_keyword(x)"),
}


def hooked_cell():
    cell = Net()
    cell.register_backward_hook(lambda cell, grad_input, grad_output: None)
    return cell


@pytest.mark.parametrize("build", WITH_HOOK.values(), ids=WITH_HOOK)
def test_a_backward_pass_of_its_own_is_found(build):
    assert NetworkCode(build()).has_own_backward()


def recomputed():
    cell = Net()
    cell.dense.recompute()
    return cell


class NoDict:
    @property
    def __dict__(self):
        raise RuntimeError("no dict")


def module_of_both():
    """A module has the name of a method, and something else of it is called."""
    network = calling("self.hook_there(x) + MODULE.double_there(x)")
    type(network).hook_there = lambda self, x: x
    return network


WITHOUT = {
    "none": Net,
    "a module's other function": lambda: calling("MODULE.double_there(x)"),
    "a helper's other function": lambda: Net(Helper.function),
    "MindSpore's own": recomputed,
    "odd attributes": lambda: Net({"odd": Odd(), "class": Odd, "in another": types.SimpleNamespace(odd=Odd())}),
    "a name that is also in a module": module_of_both,
    "an object without a dict": lambda: Net(NoDict()),
    "a cell that was not initialised": lambda: Net({"cell": nn.Cell.__new__(Net)}),
    "a list that has itself": lambda: Net(endless()),
}


@pytest.mark.parametrize("build", WITHOUT.values(), ids=WITHOUT)
def test_where_there_is_none_there_is_none(build):
    assert not NetworkCode(build()).has_own_backward()


class Pretender:
    """It says to be a cell or an operator, as a proxy of one does, and has none of its attributes."""

    def __init__(self, kind):
        self.kind = kind

    @property
    def __class__(self):
        return self.kind


def test_what_says_to_be_a_cell_or_an_operator_is_none():
    code = NetworkCode(Net({"cell": Pretender(nn.Cell)}))
    assert not code.has_hooks() and not code.has_own_backward()
    assert factory._sent_forward(Net({"operator": Pretender(ops.AllGather)})) == []


def test_what_adds_up_over_processes_is_found_but_not_the_flag_of_fault_tolerance():
    def hook(grad):
        return mint.distributed.all_reduce(grad)

    assert NetworkCode([ops.AllReduce(), ops.AllGather()]).reductions() == ["AllReduce"]
    assert NetworkCode(hook).reductions() == ["all_reduce"]
    assert NetworkCode([ops.AllReduce().add_prim_attr("tft_report_before", True)]).reductions() == []


def test_installed_packages_are_users_code_and_parts_of_python_are_not():
    assert not is_user(functools.wraps) and not is_user(json) and not is_user(nn.Dense)
    assert is_user(pytest.fixture) and is_user(pytest) and is_user(MODULE)


def test_functions_of_the_standard_library_are_not_followed_but_what_they_are_given_is():
    code = NetworkCode(calling("json.dumps(x) and functools.reduce(doubled, x)"))
    assert doubled in code.reached
    assert "JSONEncoder" in json.dumps.__code__.co_names and "JSONEncoder" not in code.names


def test_of_large_collections_only_the_first_items_are_looked_at():
    words = {f"word {i}": [i] for i in range(100_000)}
    code = NetworkCode(Net([words, [(i,) for i in range(100_000)], hooking]))
    assert hooking in code.reached and len(code.reached) < 5_000
