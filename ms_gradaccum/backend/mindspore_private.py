"""All private names of MindSpore that this package imports, since a new version may change them.

All are in MindSpore 2.7 to 2.10, except where a comment names other versions. No other file imports private names.
"""

from typing import Any

from mindspore import _c_expression, context, nn
from mindspore.dataset.core import config
from mindspore.ops import primitive
from mindspore.parallel import _auto_parallel_context, _utils
from mindspore.train import amp, callback

try:
    from mindspore.graph import api
except ImportError:  # MindSpore 2.7 and 2.8
    from mindspore.common import api

# Returns the mode. ms.get_context("mode") takes 25 times as long, and each call of a step asks.
get_mode = context._get_mode

# Records the operators of the caller in PYNATIVE mode, for its `loss.backward()`.
pynative_executor = api._pynative_executor

# A decorator: the function runs while a graph is compiled, if all arguments are constants there. Otherwise it becomes
# part of the graph; the public `constexpr` would only warn then.
primexpr = primitive._primexpr

# Returns the settings of semi-auto-parallel, of which `ms.get_auto_parallel_context` has only some.
auto_parallel_context = _auto_parallel_context.auto_parallel_context

# Give the context the settings of an AutoParallel, and reset them. MindSpore's own step does so around a compilation.
init_auto_parallel_context = _utils._init_auto_parallel_context
clear_auto_parallel_context = _utils._clear_auto_parallel_context

# A cell that casts the outputs of a network to float32, as `amp.build_train_network` has it before the loss.
OutputTo32 = amp._OutputTo32

# The types of the objects that `Model` gives to its own methods.
CallbackManager = callback._CallbackManager
InternalCallbackParam = callback._InternalCallbackParam

# The settings of the data pipeline. `ds.config.set_seed` would seed Python and NumPy, too.
dataset_config = config._config


# Runs a compiled graph of a cell, by its name, without the checks of a call of the cell.
run_graph = api._cell_graph_executor._exec_pip

# Sets the compiler's settings with which the next graph runs.
use_jit_config = api._cell_graph_executor._graph_executor.set_jit_config


def free_graphs(cell: nn.Cell) -> None:
    """Free the compiled graphs of a cell, with the memory that one of them keeps after an error."""
    api._cell_graph_executor.del_net_res(cell, cell.compile_cache)
    cell.compile_cache.clear()


def copy_compiler_settings(cell: nn.Cell, like: nn.Cell) -> None:
    """Give ``cell`` the compiler's settings of another cell, as MindSpore's own wrappers do."""
    cell._get_attr_from_cell(like)


def registered_hooks(cell: nn.Cell) -> tuple[Any, ...]:
    """Return the hooks of a cell: a dict for each kind, or None."""
    return cell._forward_hook, cell._forward_pre_hook, cell._backward_hook, cell._backward_pre_hook


def accept_jit_functions() -> None:
    """Let graphs contain functions with a @jit of their own, which a gradient in PYNATIVE mode forbids."""
    _c_expression.MSContext.get_instance()._set_not_convert_jit(False)


def launches_block() -> bool:
    """Return whether the host waits for each operator on GPU. `mindspore.runtime` only has a function to set it."""
    return bool(_c_expression.RuntimeConf.get_instance().is_launch_blocking())
