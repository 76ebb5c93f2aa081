"""What the step needs to know of an optimizer: whether it fits the network, and its learning rate."""

import gc
import weakref
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer

from ms_gradaccum._checks import sentence
from ms_gradaccum.loss_weight import scalar

_OWN_REMEDY = "Build it from network.trainable_params()."

# The training cell that each optimizer belongs to. Weak on both sides: it goes with either of them.
_trainers: "weakref.WeakKeyDictionary[nn.Cell, weakref.ref[nn.Cell]]" = weakref.WeakKeyDictionary()


def check_optimizer(owner: str, optimizer: Any, network: nn.Cell) -> None:
    """Raise unless ``optimizer`` is one, updates parameters of ``network`` and is free."""
    if not isinstance(optimizer, (nn.Optimizer, ExperimentalOptimizer)):
        got = type(optimizer).__name__
        rule = "an optimizer of mindspore.nn, mindspore.mint or mindspore.experimental"
        raise TypeError(sentence(owner, "optimizer", rule, got, _OWN_REMEDY))
    if getattr(optimizer, "thor", False):
        got = "thor, which keeps statistics of the last forward pass"
        remedy = "Those of one micro batch are not those of the batch; choose another optimizer."
        raise ValueError(sentence(owner, "optimizer", "one that needs gradients only", got, remedy))
    known = {id(parameter) for parameter in network.get_parameters()}
    strangers = [parameter.name for parameter in optimizer.parameters if id(parameter) not in known]
    if strangers:
        got = f"{len(strangers)} parameters that it does not have, first {strangers[0]!r}"
        raise ValueError(sentence(owner, "optimizer", "one over parameters of the network", got, _OWN_REMEDY))
    _check_free(owner, optimizer)


def _check_free(owner: str, optimizer: nn.Cell) -> None:
    if _trainer(optimizer) is None:
        return
    gc.collect()  # A deleted training cell lives on in reference cycles.
    if _trainer(optimizer) is not None:
        got = f"the optimizer of another {type(_trainer(optimizer)).__name__}"
        remedy = "Two training cells would divide its windows between them: use the first one, or delete it."
        raise ValueError(sentence(owner, "optimizer", "one that nothing else trains with", got, remedy))


def _trainer(optimizer: nn.Cell) -> Any:
    reference = _trainers.get(optimizer)
    return None if reference is None else reference()


def claim_optimizer(optimizer: nn.Cell, train_step: nn.Cell) -> None:
    """Record that ``train_step`` trains with ``optimizer``."""
    _trainers[optimizer] = weakref.ref(train_step)


def keeps_absent_rows(optimizer: nn.Cell) -> bool:
    """Return whether a sparse gradient makes the optimizer leave alone the rows that it does not mention."""
    lazy = (nn.FTRL, nn.LazyAdam, nn.ProximalAdagrad)
    return isinstance(optimizer, lazy) or bool(getattr(optimizer, "use_lazy", False))


def all_parameters(optimizer: nn.Cell) -> ParameterTuple:
    """Return every parameter of the optimizer, also those that it keeps in lists and groups."""
    # By name: a group can hold a rate that the optimizer has replaced by one of the same name.
    found = {item.name: item for item in optimizer.get_parameters()}
    places = [
        *vars(optimizer).values(),
        *(v for group in getattr(optimizer, "param_groups", []) for v in group.values()),
    ]
    for place in places:
        for item in place if isinstance(place, (list, tuple)) else [place]:
            if isinstance(item, Parameter):
                found.setdefault(item.name, item)
    return ParameterTuple(found.values())


def may_have_branches(optimizer: nn.Cell) -> bool:
    """Return whether the update may have branches that depend on values, which those of mindspore.nn have not."""
    parts = {optimizer, inner_optimizer(optimizer)}
    return any(not type(part).__module__.startswith("mindspore.nn.") or isinstance(part, nn.ASGD) for part in parts)


def inner_optimizer(optimizer: nn.Cell) -> nn.Cell:
    """Return the optimizer that has the rate and the count of updates: LARS leaves both to the one that it wraps."""
    return optimizer.opt if isinstance(optimizer, nn.LARS) else optimizer


class LearningRate(nn.Cell):
    """Learning rate of the next update: a float32 scalar, or one entry per parameter if groups differ."""

    def __init__(self, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = inner_optimizer(optimizer)
        self.groups = tuple(range(len(optimizer.lrs))) if isinstance(optimizer, ExperimentalOptimizer) else None

    def construct(self) -> Tensor:
        if self.groups is None:
            rates = self.optimizer.get_lr()
        else:
            rates = tuple([self.optimizer.lrs[i] for i in self.groups])
        if isinstance(rates, (tuple, list)):
            rates = tuple([scalar(rate) for rate in rates])
            return ops.stack(rates) if len(rates) > 1 else rates[0] + 0.0
        # + 0.0: a copy, since the report outlives the next change of the parameter.
        return scalar(rates) + 0.0
