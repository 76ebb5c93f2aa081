"""Argument checks, and the wording of their errors."""

import contextlib
import difflib
import functools
import inspect
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeGuard, TypeVar

import mindspore as ms
import numpy as np
from mindspore import nn

_T = TypeVar("_T")
_Types = type[_T] | tuple[type[_T], ...]
State = dict[str, Any]  # The state of an object, as JSON.
# The limits of int32 and float32.
MIN_INT = -(2**31)
MAX_INT = 2**31 - 1
_LEAST_FLOAT32 = float(np.finfo(np.float32).tiny)
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_MOST_CHARACTERS = 100  # Of a value in a message: a list of batches has thousands of lines.
# Path prefixes of code that is not the user's: this package, MindSpore, and the context managers around both.
LIBRARIES = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(ms.__file__).parent}{os.sep}",
    contextlib.__file__,
)
# The names of arguments in other libraries. Without a check, assigning them to a built object would have no effect.
_OTHER_NAMES = {
    "accumulation_steps": (
        "gradient_accumulation_steps grad_accumulation_steps gradient_accumulate_steps "
        "grad_accum_steps accumulate_grad_batches gradient_accumulation accum_steps acc_steps "
        "accumulate_steps accum_iter"
    ),
    "micro_tokens": "max_tokens tokens_per_micro_batch max_token_len max_tokens_per_gpu",
    "micro_size": (
        "micro_batches num_micro_batches micro_batch_num micro_batch_size num_microbatches chunks"
    ),
    "clip": (
        "clip_grad clip_grad_norm clip_norm clip_value max_norm max_grad_norm gradient_clip_val "
        "gradient_clipping grad_clip clip_global_norm use_clip_grad"
    ),
    "skip_above": (
        "grad_norm_skip_threshold skip_step_on_spikes skip_grad_norm skip_bad_steps "
        "max_grad_norm_spike"
    ),
    "mixed_precision": (
        "precision amp amp_level use_amp fp16 bf16 float16 bfloat16 dtype autocast loss_scale "
        "loss_scaler loss_scale_manager scaler grad_scaler scale_sense keep_batchnorm_fp32"
    ),
    "last_window": "drop_last drop_remainder",
    "batch_axis": "batch_dim axis dim",
    "compile": "jit use_jit jit_level",
}
_RIGHT_NAMES: dict[str, str] = {}
for _name, _others in _OTHER_NAMES.items():
    _RIGHT_NAMES |= dict.fromkeys((_name, *_others.split()), _name)
# The error of a collective operator, op by op or in a graph.
_LOST = re.compile(
    r"Launch kernel failed\S* .*(AllReduce|AllGather|ReduceScatter|Broadcast)(?![A-Za-z])"
)
_IN_FULL = {"clip": "clip=ClipByGlobalNorm(1.0)", "mixed_precision": "mixed_precision='fp16'"}
_LOSS_NAMES = {"loss", "loss_fn", "loss_func", "criterion"}
# The remedy for a loss function in the place of another argument.
LOSS_INSIDE = "A loss function goes into the network: nn.WithLossCell(network, loss_fn)."


def argument_error(owner: str, name: str, rule: str, value: object, remedy: str) -> str:
    """Return the message of an argument error: the rule, the value given, the remedy."""
    return f"For '{owner}', the argument '{name}' must be {rule}, but got {value}. {remedy}"


def refuse_unknown(
    owner: str, function: Callable[..., object], arguments: Mapping[str, object]
) -> None:
    """Raise for unknown keyword arguments, and suggest the right names."""
    parameters = inspect.signature(function).parameters.values()
    known = [
        each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    unknown = [name for name in arguments if name not in known]
    if not unknown:
        return
    meant = []
    for name in unknown:
        close = difflib.get_close_matches(name, known, 1)
        right = _RIGHT_NAMES.get(name, *close or [""])
        if right:
            hint = _IN_FULL.get(right, right)
            if right not in known:
                is_split = right in ("micro_size", "micro_tokens", "batch_axis")
                hint += " of GradAccumulation" if is_split else " of TrainOneStepCell or Model"
            if len(unknown) > 1:
                hint += f" for {name}"
            meant.append(hint)
    remedy = f"Did you mean {', '.join(meant)}?" if meant else f"It has {', '.join(known[1:])}."
    if not _LOSS_NAMES.isdisjoint(unknown):
        remedy = LOSS_INSIDE
    elif any(hint.startswith("micro_size") for hint in meant):
        remedy += " It counts micro batches, not their rows."
    noun = "argument" if len(unknown) == 1 else "arguments"
    raise TypeError(f"For '{owner}', unexpected {noun} {', '.join(map(repr, unknown))}. {remedy}")


def refuse_nameless(owner: str, last: str, others: Sequence[object]) -> None:
    """Raise for arguments without a name after the argument ``last``: Python's own error only counts them."""
    if not others:
        return
    remedy = "Write name=value."
    if isinstance(others[0], nn.Cell):
        remedy = LOSS_INSIDE
    raise TypeError(
        f"For '{owner}', arguments after '{last}' need a name, but got {typed(others[0])}. {remedy}"
    )


class FrozenAfterInit:
    """Base class of objects that read their settings once. A later assignment raises, since it would have no effect.

    A constructor ends with ``self._is_built = True``.
    """

    _is_built = False
    # Checks of the settings that are read in each call.
    _obeyed: Mapping[str, Callable[[Any], Any]] = {}

    def __setattr__(self, name: str, value: object) -> None:
        own: Any = type(self)
        if self._is_built and name in _settings(own) and value is not getattr(self, name, None):
            kind = next(
                each.__name__
                for each in own.__mro__
                if each.__module__.startswith(f"{__package__}.")
            )
            if name not in self._obeyed:
                raise ValueError(
                    f"For '{kind}', the argument '{name}' cannot be changed after construction. "
                    f"Build a new {kind}; an optimizer goes with one."
                )
            value = self._obeyed[name](value)
        super().__setattr__(name, value)


class NonCopyable:
    """Base class of training steps. A copy would share the optimizer or detach it, and hooks would not be called."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"For '{type(self).__name__}', a training step cannot be copied or pickled. Build "
            f"another one around a copy of the network; save_state() and load_state() carry its "
            f"state over."
        )

    def _refuse_hook(self, *hooks: object, **settings: object) -> NoReturn:
        raise TypeError(
            f"For '{type(self).__name__}', a hook of a training step would never be called. "
            f"Register it on the loss cell, or write a callback."
        )

    register_forward_pre_hook = register_forward_hook = _refuse_hook
    register_backward_pre_hook = register_backward_hook = _refuse_hook


@functools.cache
def _settings(kind: Any) -> frozenset[str]:
    """Return the argument names of a class and of its bases, and their synonyms in other libraries."""
    names = set(_RIGHT_NAMES)
    for each in kind.__mro__:
        constructor = vars(each).get("__init__")
        if getattr(constructor, "__module__", "").startswith(f"{__package__}."):
            names.update(inspect.signature(constructor).parameters)
    return frozenset(names)


def is_a(value: object, kinds: _Types[_T]) -> TypeGuard[_T]:
    """Return whether a value has one of these types, ignoring its ``__class__``."""
    return issubclass(type(value), kinds)


def typed(value: object) -> str:
    """Describe a value of the wrong type for an error message, in one line."""
    text = repr(value)
    if len(text) > _MOST_CHARACTERS:
        text = " ".join(text[:_MOST_CHARACTERS].split()) + "..."
    return f"{text} of type {type(value).__name__}"


def check_type(
    owner: str, name: str, value: object, kinds: _Types[_T], rule: str, remedy: str
) -> _T:
    """Return ``value`` if it has one of these types. A bool does not count as a number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise TypeError(argument_error(owner, name, rule, typed(value), remedy))
    return value


def check_int(
    owner: str, name: str, value: object, remedy: str, least: int = 1, most: int = MAX_INT
) -> int:
    """Return ``value`` if it is an int in these bounds."""
    rule = "a positive int" if least == 1 else f"an int of at least {least}"
    number = check_type(owner, name, value, int, rule, remedy)
    if number > most:
        rule += f", at most {most}"
    if not least <= number <= most:
        raise ValueError(argument_error(owner, name, rule, number, remedy))
    return number


def check_float(
    owner: str,
    name: str,
    value: object,
    remedy: str,
    least: float = _LEAST_FLOAT32,
    below: float = math.inf,
) -> float:
    """Return ``value``, a number or a tensor or array of one element, as a float if it is in these bounds.

    As a float32, the dtype of its tensor, it must be finite, too.
    """
    array = value.asnumpy() if isinstance(value, ms.Tensor) else value
    if isinstance(array, (np.ndarray, np.generic)) and array.size == 1:
        value = array.item()
    rule = "a positive number" if least == _LEAST_FLOAT32 else f"a number of at least {least:g}"
    if below < math.inf:
        rule += f" and below {below:g}"
    number = check_type(owner, name, value, (int, float), rule, remedy)
    if not least <= number <= _LARGEST_FLOAT32 or number >= below:
        raise ValueError(
            argument_error(owner, name, f"{rule} in the range of float32", number, remedy)
        )
    return float(number)


def check_loss(owner: str, value: object) -> float:
    """Return a loss for the report as a float; NaN for None. An Inf or a NaN is accepted."""
    if value is None:
        return math.nan
    got = typed(value)
    if isinstance(value, (int, float, ms.Tensor, np.ndarray, np.generic)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            got = repr(value)
    raise TypeError(
        f"For '{owner}', the argument 'loss' must be a number, a tensor of one element or None, "
        f"but got {got}. It appears only in the report."
    )


def check_construct(owner: str, kind: type, base: type, remedy: str) -> None:
    """Raise if a subclass overrides `construct`, which nothing would call."""
    own = next(each for each in kind.__mro__ if "construct" in vars(each))
    if own is not base:
        raise TypeError(
            f"For '{owner}', the construct() of {own.__name__} would never be called. {remedy}"
        )


def check_bool(owner: str, name: str, value: object, remedy: str) -> bool:
    return check_type(owner, name, value, bool, "a bool", remedy)


def check_choice(owner: str, name: str, value: object, choices: Sequence[str], remedy: str) -> str:
    rule = "one of " + ", ".join(map(repr, choices))
    choice = check_type(owner, name, value, str, rule, remedy)
    if choice not in choices:
        raise ValueError(argument_error(owner, name, rule, repr(choice), remedy))
    return str(choice)


def check_path(owner: str, name: str, value: object, remedy: str) -> str:
    """Return ``value`` as a string if it is a valid path."""
    given: Any = check_type(
        owner, name, value, (str, os.PathLike), "a str or an os.PathLike", remedy
    )
    try:
        path = os.fsdecode(os.fsencode(given))
    except UnicodeEncodeError:
        path = ""
    if not path or "\0" in path:
        raise ValueError(argument_error(owner, name, "a valid path", repr(value), remedy))
    return path


def check_cell(owner: str, name: str, value: object, remedy: str) -> nn.Cell:
    return check_type(owner, name, value, nn.Cell, "an nn.Cell", remedy)


def check_micro_size(value: object) -> int:
    """Return ``value`` if it is a positive int, or 1 for "auto": batches are split where memory runs out."""
    if isinstance(value, str) and value == "auto":
        return 1
    remedy = "It counts the micro batches of one batch; 1 means no split."
    if isinstance(value, nn.Cell):
        remedy = LOSS_INSIDE
    return check_int("GradAccumulation", "micro_size", value, remedy)


class GradAccumulationWarning(UserWarning):
    """The class of all warnings of this package.

    A filter for this class silences them. A filter that ignores all warnings does not: they go to the logger
    ``ms_gradaccum`` then, since a training may be wrong without another sign.
    """


def warn(message: str) -> None:
    """Warn at the line of the user's program that led here."""
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
        level += 1
    if _is_hidden(message, frame):
        logging.getLogger("ms_gradaccum").warning(message)
    warnings.warn(message, GradAccumulationWarning, stacklevel=level)


def _is_hidden(message: str, frame: FrameType) -> bool:
    """Return whether a filter for more than our own warnings ignores this one."""
    module = frame.f_globals.get("__name__") or "<unknown>"
    warning = GradAccumulationWarning(message)
    for action, text, category, name, line in warnings.filters:
        is_ours = isinstance(warning, category) and line in (0, frame.f_lineno)
        if is_ours and _matches(text, message) and _matches(name, module):
            return action == "ignore" and category is not GradAccumulationWarning
    return False


def _matches(pattern: str | re.Pattern[str] | None, text: str) -> bool:
    """Return whether a text fits a pattern of a filter; Python's default filters have a string for the module."""
    if pattern is None or isinstance(pattern, str):
        return pattern in (None, text)
    return pattern.match(text) is not None


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of the error's type."""
    for line in map(str.strip, str(error).splitlines()):
        # MindSpore frames headings such as "- Kernel error:" with lines of dashes.
        if line.strip("-") and not line.startswith("- "):
            return line
    return type(error).__name__


def is_lost(owner: str, error: BaseException) -> bool:
    """Return whether an error is that of a collective without an answer from other ranks, and explain it first."""
    lost = _LOST.search(f"{error}") is not None
    if lost and not f"{error}".startswith("For '"):
        error.args = (
            f"For '{owner}', a collective failed: the ranks made different calls, or one of them "
            f"ended. Perhaps one rank saved, stopped, flushed or evaluated alone, or had another "
            f"number of batches (of micro batches, if the network communicates). See the logs of "
            f"all ranks.\n{error}",
        )
    return lost


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 batch" and "2 batches"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("ch") else f"{number} {noun}s"


def listed(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and the number of the others."""
    text = ", ".join(names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text


class DamagedState(ValueError):
    """Error for a saved state that is damaged or belongs to another program."""


def is_count(value: object, least: int = 0) -> bool:
    """Return whether a value from a manifest is a count of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**62


def is_positive(value: object) -> bool:
    return isinstance(value, float) and 0 < value <= _LARGEST_FLOAT32


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


def another_program(what: str) -> DamagedState:
    """Return the error for an intact state that does not fit this program."""
    return DamagedState(f"the state belongs to another network, optimizer or setting: it {what}")


def check_saved(
    saved: object, what: str, rules: Mapping[str, Callable[[object], bool]]
) -> dict[str, Any]:
    """Return the items of a `state_dict` that have rules. Raise unless each of them follows its rule."""
    if not isinstance(saved, dict) or not all(
        name in saved and keeps(saved[name]) for name, keeps in rules.items()
    ):
        raise DamagedState(f"the state does not say {what}")
    return {name: saved[name] for name in rules}


def check_saved_list(saved: object, what: str, length: int) -> list[Any]:
    """Return a list from a state. Raise unless it has as many items as this program."""
    if not isinstance(saved, list) or len(saved) != length:
        raise another_program(f"does not have {length} {what}")
    return saved


@contextlib.contextmanager
def all_or_nothing(item: Any) -> Iterator[None]:
    """Restore ``item`` if loading a state into it fails inside this context."""
    before = item.state_dict()
    try:
        yield
    except BaseException:
        item.load_state_dict(before)
        raise
