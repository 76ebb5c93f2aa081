"""The loss scale, which keeps small half-precision gradients from underflow. It is constant in a window.

The rule is that of "Mixed Precision Training" (Micikevicius et al., 2018), as in PyTorch's ``GradScaler``.
"""

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, amp, nn, ops

from ms_gradaccum._checks import State, another_program
from ms_gradaccum.backend.compiled import Compiled
from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.backend.plain_state import PlainState
from ms_gradaccum.backend.tensors import Done


class ChooserState:
    """The state of a loss scale besides its parameters: that of a user's object which chooses the scale."""

    def __init__(self, chooser: object = None) -> None:
        self.chooser = chooser

    def state_dict(self) -> State:
        return {} if self.chooser is None else PlainState(self.chooser).state_dict()

    def load_state_dict(self, saved: object) -> None:
        if self.chooser is not None:
            PlainState(self.chooser).load_state_dict(saved)
        elif saved != {}:
            raise another_program("has the loss scale of a user's own class")


class NoLossScale(nn.Cell):
    """Placeholder used when losses are not scaled, and the interface of the other classes."""

    skips_overflow = True  # True if a window whose gradient has an Inf or a NaN makes no update.
    # scales: True if losses are scaled. searches: True if the scale adapts, so that some windows are skipped.
    scales = False
    searches = False
    # True if an optimizer with its own divisor divides by the scale, as in MindSpore's own step.
    is_left_to_optimizer = False
    chooser_state = ChooserState()

    def value(self) -> Tensor:
        """Return the scale of the open window, a float32 scalar."""
        return Tensor(1.0, ms.float32)

    def get_loss_scale(self) -> float:
        """Return the scale of the open window as a number. The name is that of MindSpore's loss scales."""
        return float(self.value().asnumpy())

    def unscaled(self, factor: Tensor) -> Tensor:
        """Return ``factor`` divided by the scale."""
        return factor

    def construct(self, updated: Tensor, bad: Tensor, done: Done = ()) -> Done:
        """Choose the scale of the next window as part of a graph, after ``done``."""
        # A window that is neither updated nor bad, such as an empty one, does not affect the scale.
        return ()

    def adjust(self, updated: bool, bad: Tensor) -> None:
        """Choose the scale of the next window from the host."""


class FixedLossScale(NoLossScale):
    """A constant scale."""

    scales = True

    def __init__(self, scale: Parameter, skips_overflow: bool = True) -> None:
        super().__init__(auto_prefix=False)
        self.scale = scale
        self.skips_overflow = skips_overflow
        self.is_left_to_optimizer = not skips_overflow

    def value(self) -> Tensor:
        # + 0.0 makes a copy, because the report outlives the next change of the parameter.
        return self.scale + 0.0

    def unscaled(self, factor: Tensor) -> Tensor:
        return factor / self.scale


class LossScale(FixedLossScale):
    """A scale that grows after a number of clean windows and shrinks after a bad one, but not below 1."""

    searches = True

    def __init__(
        self,
        scale: Parameter,
        clean_windows: Parameter,
        growth: float,
        backoff: float,
        interval: int,
    ) -> None:
        super().__init__(scale)
        self.clean_windows = clean_windows
        self.growth = growth
        self.backoff = backoff
        self.interval = interval
        self.run = Compiled(lambda: self, "MixedPrecision", "the loss scale")

    def construct(self, updated: Tensor, bad: Tensor, done: Done = ()) -> Done:
        scale = ops.depend(self.scale + 0.0, done)
        clean = ops.depend(self.clean_windows + 0, done)
        good = ops.logical_and(updated, ops.logical_not(bad))
        full = ops.greater_equal(clean + 1, self.interval)
        larger = scale * self.growth
        grows = ops.logical_and(ops.logical_and(good, full), ops.isfinite(larger))
        smaller = ops.maximum(scale * self.backoff, ops.ones_like(scale))
        new_scale = ops.select(bad, smaller, ops.select(grows, larger, scale))
        again = ops.logical_or(bad, ops.logical_and(good, full))
        new_clean = ops.select(again, ops.zeros_like(clean), clean + ops.cast(good, ms.int32))
        return ops.assign(self.scale, new_scale), ops.assign(self.clean_windows, new_clean)

    def adjust(self, updated: bool, bad: Tensor) -> None:
        self.run(Tensor(updated), bad)


class ForeignLossScale(FixedLossScale):
    """A scale that is chosen in Python by an object with one of MindSpore's interfaces, maybe of a user's class."""

    searches = True

    def __init__(self, chooser: Any) -> None:
        super().__init__(new_scale(_scale_of(chooser)))
        self.chooser = chooser
        self.chooser_state = ChooserState(chooser)
        # A manager of a fixed scale can require updates in spite of an overflow.
        get_drop = getattr(chooser, "get_drop_overflow_update", None)
        self.skips_overflow = get_drop is None or bool(get_drop())
        # This scale changes, while that of an optimizer is fixed.
        self.is_left_to_optimizer = False

    def construct(self, updated: Tensor, bad: Tensor, done: Done = ()) -> Done:
        _refuse_in_graph(type(self.chooser).__name__)
        return ()

    def adjust(self, updated: bool, bad: Tensor) -> None:
        is_bad = bool(bad.asnumpy())
        if not (is_bad or updated):
            return
        if isinstance(self.chooser, amp.LossScaler):
            self.chooser.adjust(Tensor(not is_bad))
        else:
            self.chooser.update_loss_scale(is_bad)
        # Not by set_data(): a compiled function of the user would keep the old value.
        ops.assign(self.scale, Tensor(_scale_of(self.chooser), ms.float32))


def _scale_of(chooser: Any) -> float:
    if isinstance(chooser, amp.LossScaler):
        return float(chooser.scale(Tensor(1.0, ms.float32)).asnumpy())
    return float(chooser.get_loss_scale())


@primexpr
def _refuse_in_graph(kind: str) -> None:
    raise ValueError(
        f"For 'MixedPrecision', the loss scale inside a larger graph must be compilable, but got a "
        f"{kind}. Give a MixedPrecision, a DynamicLossScaler or a StaticLossScaler, or call the "
        f"step from Python."
    )


def new_scale(value: float) -> Parameter:
    """Return a parameter for a scale, with its name in checkpoints."""
    return Parameter(Tensor(value, ms.float32), "mixed_precision.loss_scale", requires_grad=False)


def dynamic_loss_scale(initial: float, growth: float, backoff: float, interval: int) -> LossScale:
    clean_windows = Parameter(
        Tensor(0, ms.int32), "mixed_precision.clean_windows", requires_grad=False
    )
    return LossScale(new_scale(initial), clean_windows, growth, backoff, interval)


def loss_scale_of(chooser: Any) -> NoLossScale:
    """Return the loss scale that an object of MindSpore describes. The object's parameters hold the state."""
    # The types must match exactly, because a subclass may have another rule.
    if type(chooser) is amp.DynamicLossScaler:
        factor = float(chooser.scale_factor)
        return LossScale(
            chooser.scale_value, chooser.counter, factor, 1 / factor, chooser.scale_window
        )
    if type(chooser) is amp.StaticLossScaler:
        return FixedLossScale(chooser.scale_value)
    if type(chooser) is amp.FixedLossScaleManager:
        return FixedLossScale(
            new_scale(chooser.get_loss_scale()), chooser.get_drop_overflow_update()
        )
    return ForeignLossScale(chooser)
