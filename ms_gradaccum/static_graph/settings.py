"""Settings of a step that the compiler partitions, and their checks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import argument_error, warn
from ms_gradaccum.backend.device import reduces_in_order
from ms_gradaccum.backend.mindspore_private import (
    auto_parallel_context,
    clear_auto_parallel_context,
    init_auto_parallel_context,
    launches_block,
    primexpr,
)
from ms_gradaccum.batch.token_mean_loss import TokenMeanLoss
from ms_gradaccum.gradients.clipping import Clip, ClipByValue
from ms_gradaccum.gradients.mixed_precision import reduce_dtypes
from ms_gradaccum.gradients.norm_limit import SkipAbove
from ms_gradaccum.parallel.semi_auto import SemiAuto, in_semi_auto
from ms_gradaccum.training.window_length import WindowLength

_OWNER = "TrainOneStepCell"
_ONE_BATCH = WindowLength(_OWNER, "accumulation_steps", 1)


def check_step(
    kind: SemiAuto,
    network: nn.Cell,
    optimizer: nn.Cell,
    *,
    window_length: WindowLength = _ONE_BATCH,
    clip: Clip | None = None,
    skip_above: SkipAbove = None,
    drop_non_finite: bool = False,
    dtype: ms.Type | Mapping[str, ms.Type] = ms.float32,
) -> None:
    """Raise for settings that are not supported or would give a wrong mean over rows."""
    _check_context(kind.auto_parallel)
    if window_length.most > 1:
        remedy = (
            "Give larger batches and a larger micro_size: the compiler accumulates inside one call."
        )
        raise _error("accumulation_steps", "1", window_length.as_text(), remedy)
    if network.needs_all_rows:
        remedy = "Give parallel=DataParallel() or HSDP() and a network without AutoParallel."
        got = "a GradCacheLoss, which takes two passes"
        raise _error("network", "a sum over rows", got, remedy, "GradAccumulation")
    if any(
        isinstance(cell, TokenMeanLoss) and cell.head_weight is not None
        for _, cell in network.cells_and_names()
    ):
        remedy = (
            "Blocks of the head were not tried there: let the backbone return logits, and leave "
            "out head."
        )
        raise _error("head", "None", "a head", remedy, "TokenMeanLoss")
    if network.token_limit is not None:
        remedy = "The compiler cuts each batch into equal parts: give micro_size."
        got = network.token_limit.micro_tokens
        raise _error("micro_tokens", "left out", got, remedy, "GradAccumulation")
    if drop_non_finite:
        remedy = (
            "The compiler takes one gradient of the whole batch, so it cannot leave out a part."
        )
        raise _error("bad_micro_batch", "'skip_window'", "'drop'", remedy)
    if not (clip is None or clip.has_one_factor or isinstance(clip, ClipByValue)):
        raise _error(
            "clip",
            "one limit for all parameters",
            repr(clip),
            "Use ClipByGlobalNorm or ClipByValue.",
        )
    if skip_above is not None:
        remedy = "Use DataParallel() or HSDP() of this package."
        raise _error("skip_above", "None", skip_above, remedy)
    names = [parameter.name for parameter in optimizer.parameters]
    if set(reduce_dtypes(dtype, names)) != {ms.float32}:
        remedy = "The compiler chooses what it sends."
        raise _error(
            "mixed_precision", "one with float32 messages", f"reduce_dtype={dtype}", remedy
        )
    trained = {id(parameter) for parameter in optimizer.parameters}
    left_out = [
        parameter.name for parameter in network.trainable_params() if id(parameter) not in trained
    ]
    if network.splits and left_out:
        # The compiler expects an accumulator for each trainable parameter.
        got = f"{len(left_out)} parameters without it, first {left_out[0]!r}"
        remedy = "Set requires_grad = False on the others before the step is built."
        raise _error("optimizer", "an optimizer of all trainable parameters", got, remedy)
    _warn_of_messages()


def _error(name: str, rule: str, got: object, remedy: str, owner: str = _OWNER) -> ValueError:
    return ValueError(argument_error(owner, name, f"{rule} in semi-auto-parallel", got, remedy))


def _warn_of_messages() -> None:
    """Warn where messages do not wait for the values that they send."""
    if not reduces_in_order() and not launches_block():
        warn(
            "For 'TrainOneStepCell', a semi-auto-parallel step on GPU may send values too early in "
            "MindSpore 2.10, so that parameters become wrong, with MindSpore's own step too. Call "
            "mindspore.runtime.launch_blocking() first, or use DataParallel() or HSDP()."
        )


def _check_context(auto_parallel: AutoParallel | None) -> None:
    """Raise for settings of an AutoParallel or, without one, of MindSpore's context."""

    def setting(name: str) -> Any:
        return (
            ms.get_auto_parallel_context(name)
            if auto_parallel is None
            else getattr(auto_parallel, f"_{name}")
        )

    stages = setting("pipeline_stages")
    if stages > 1:
        remedy = "Pipeline parallelism has micro batches of its own: do not call pipeline()."
        raise ValueError(
            argument_error(
                _OWNER, "network", "in one pipeline stage", f"{stages} pipeline stages", remedy
            )
        )
    if setting("gradients_mean"):
        remedy = (
            "The mean is taken over the rows of all ranks, exactly; a second division would make "
            "it too small."
        )
        raise ValueError(
            argument_error(
                _OWNER, "network", "without gradients_mean", "gradients_mean=True", remedy
            )
        )
    if not setting("loss_repeated_mean"):
        rule, got = "with loss_repeated_mean", "loss_repeated_mean=False"
        remedy = (
            "Without it each rank would count the whole loss: do not call "
            "disable_loss_repeated_mean()."
        )
        raise ValueError(argument_error(_OWNER, "network", rule, got, remedy))


@contextmanager
def compiling(kind: SemiAuto) -> Iterator[None]:
    """Compile with the settings of ``kind`` inside this context, and reset them afterwards."""
    # A Model has already set them for everything that it compiles.
    is_outside = kind.auto_parallel is not None and not in_semi_auto()
    try:
        if is_outside:
            init_auto_parallel_context(kind.auto_parallel)
        yield
    except RuntimeError as error:
        if "Cannot find micro info" not in f"{error}{error.__cause__}":
            raise
        # The compiler assumes that the backward pass of the first operator with a parameter ends a micro batch. A cast
        # to 16 bits is shared by all micro batches, so the compiler finds no micro batch for it.
        rule = "a network with its first weight in float32, in semi-auto-parallel"
        remedy = "Keep its first layer in float32, or build it with lazy_inline."
        raise ValueError(
            argument_error(_OWNER, "network", rule, "a cast to 16 bits", remedy)
        ) from error
    finally:
        if is_outside:
            clear_auto_parallel_context(kind.auto_parallel)
        forget_accumulation()


def forget_accumulation() -> None:
    """Reset the compiler's number of micro batches, so that a network without accumulation compiles again."""
    if auto_parallel_context().get_grad_accumulation_step() > 1:
        auto_parallel_context().set_grad_accumulation_step(1)


@primexpr
def require_partition() -> None:
    """Raise if a partitioned step is compiled with other settings than it was built for."""
    if not in_semi_auto():
        got = "a graph around it, compiled without the settings of its AutoParallel"
        remedy = "Give Model(AutoParallel(network), optimizer=optimizer)."
        raise ValueError(
            argument_error(_OWNER, "network", "compiled as the outermost cell", got, remedy)
        )
    _check_context(None)


@primexpr
def gradient_is_returned(micro_size: int) -> bool:
    """Return whether the gradient operator returns the reduced gradient. Otherwise the accumulators hold it."""
    # Read during compilation, since a cell may be built before the settings are active.
    return micro_size == 1 or bool(auto_parallel_context().get_enable_parallel_optimizer())
