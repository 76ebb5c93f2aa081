"""What is measured: a network, its optimizer, a batch, and where a script makes them."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import nn

from ms_gradaccum._checks import sentence
from ms_gradaccum.backend.compiled import check_compile
from ms_gradaccum.backend.optimizers import check_optimizer
from ms_gradaccum.batch.nested_inputs import as_call
from ms_gradaccum.batch.split import SplitBatch, split_batch
from ms_gradaccum.gradients.clipping import check_clip
from ms_gradaccum.gradients.mixed_precision import check_precision
from ms_gradaccum.gradients.non_finite import check_bad_micro_batch
from ms_gradaccum.parallel.semi_auto import is_semi_auto
from ms_gradaccum.training.grad_accumulation import GradAccumulation, as_grad_accumulation

OWNER = "find_micro_size"
# How many micro batches stand for all at either end: the second one reuses what the first one has left.
_ENDS = 2
_SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    "clip": check_clip,
    "mixed_precision": check_precision,
    "bad_micro_batch": check_bad_micro_batch,
    "compile": check_compile,
}


class Context(NamedTuple):
    """Where the caller computes."""

    mode: int
    device_target: str
    device_id: int

    @staticmethod
    def current() -> "Context":
        """Return that of this process."""
        return Context(*(ms.get_context(name) for name in Context._fields))

    def enter(self) -> None:
        """Compute there from now on."""
        ms.set_context(mode=self.mode)
        if self.device_target == "CPU":
            ms.set_device("CPU")
        else:
            ms.set_device(self.device_target, self.device_id)


class Training(NamedTuple):
    """A network in micro batches, its optimizer, one batch, and the settings of a TrainOneStepCell."""

    network: GradAccumulation
    optimizer: nn.Cell
    inputs: tuple[Any, ...]
    settings: dict[str, Any]

    def rows(self) -> int:
        """Return the rows of the batch."""
        return split_batch(self.inputs, 1, self.network.batch_axis).micro_batches[0].rows

    def in_parts(self, micro_size: int) -> GradAccumulation:
        """Return the network in so many micro batches, of which a few stand for all."""
        whole = self.network
        settings: dict[str, Any] = {"weighted": whole.weighted, "terms": whole.terms, "losses": whole.losses}
        return FewMicroBatches(whole.network, micro_size, batch_axis=whole.batch_axis, **settings)


class FewMicroBatches(GradAccumulation):
    """Splits a batch whole, and trains with the first and the last micro batches alone.

    The others have the same shapes and reuse the same memory. All of them exist, as in training: where rows are
    copied, that takes as much as the batch.
    """

    def split(self, *args: Any, **kwargs: Any) -> SplitBatch:
        """Return a few of the micro batches of one batch; the larger ones come first, the smaller ones last."""
        batch = self.whole = super().split(*args, **kwargs)
        if len(batch.micro_batches) <= 2 * _ENDS:
            return batch
        return SplitBatch(batch.structure, [*batch.micro_batches[:_ENDS], *batch.micro_batches[-_ENDS:]])


def check_training(network: Any, optimizer: Any, batch: Any, settings: dict[str, Any]) -> Training:
    """Return what is to be trained, or raise."""
    if isinstance(network, nn.Cell) and is_semi_auto(network):
        got = "one that the compiler partitions, which one process alone cannot measure"
        raise ValueError(sentence(OWNER, "network", "a loss cell of one process", got, "Give the cell inside."))
    network = as_grad_accumulation(OWNER, network)
    check_optimizer(OWNER, optimizer, network)
    for name, value in settings.items():
        if name not in _SETTINGS:
            rule = "one of " + ", ".join(repr(name) for name in _SETTINGS)
            raise ValueError(sentence(OWNER, "settings", rule, repr(name), "It is what TrainOneStepCell is given."))
        _SETTINGS[name](OWNER, value)
    args, kwargs = as_call(OWNER, batch)
    inputs = network.positional(args, kwargs)
    network.bind(inputs, {})
    training = Training(network, optimizer, inputs, settings)
    training.rows()
    return training


class Script(NamedTuple):
    """The name of a function that returns `(network, optimizer, batch)`, and perhaps a dict of settings."""

    name: str

    def build(self) -> Training:
        """Call the function."""
        place, _, function = self.name.rpartition(":")
        if not place or not function:
            rule = "script.py:function or module:function"
            raise ValueError(sentence(OWNER, "script", rule, repr(self.name), "For example train.py:build."))
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        build = getattr(module, function, None)
        if not callable(build):
            rule = f"the name of a function of {place}"
            raise ValueError(sentence(OWNER, "script", rule, repr(function), "It is called without arguments."))
        made = build()
        if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance((*made, {})[3], dict):
            rule = f"such that {function}() returns (network, optimizer, batch) or (network, optimizer, batch, dict)"
            got = f"{type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple) else "")
            raise TypeError(sentence(OWNER, "script", rule, got, "The dict has settings of TrainOneStepCell."))
        network, optimizer, batch, settings = (*made, {})[:4]
        return check_training(network, optimizer, batch, settings)


def _import_file(path: Path) -> Any:
    """Import a script that is in no package, as its own folder would."""
    path = path.resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # It ends in .py.
    module = importlib.util.module_from_spec(spec)
    # The compiler looks up what a function uses in the module of that name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
