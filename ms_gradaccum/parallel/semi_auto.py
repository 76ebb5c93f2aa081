"""Settings of semi-auto-parallel, in which the compiler partitions a step, and their checks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mindspore as ms
from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum._checks import argument_error, require, warn
from ms_gradaccum.backend.device import device_target
from ms_gradaccum.backend.mindspore_private import (
    auto_parallel_context,
    clear_auto_parallel_context,
    init_auto_parallel_context,
    launches_block,
    primexpr,
)
from ms_gradaccum.backend.network_code import NetworkCode
from ms_gradaccum.gradients.clipping import Clip, ClipByValue
from ms_gradaccum.gradients.mixed_precision import reduce_dtypes

_OWNER = "TrainOneStepCell"
_MODES = ("semi_auto_parallel", "auto_parallel")
_SETTINGS = ("pipeline_stages", "gradients_mean", "loss_repeated_mean")


class SemiAuto:
    """Semi-auto-parallel, set by an AutoParallel or, without one, in MindSpore's context."""

    def __init__(self, network: nn.Cell) -> None:
        self.auto_parallel = network if isinstance(network, AutoParallel) else None

    def check(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        *,
        accumulation_steps: int = 1,
        clip: Clip | None = None,
        drop_non_finite: bool = False,
        dtype: ms.Type | Mapping[str, ms.Type] = ms.float32,
    ) -> None:
        """Raise for settings that are not supported or would give a wrong mean over rows."""
        _check_settings(self.auto_parallel)
        one_gradient = "The compiler takes one gradient of the whole batch, so it cannot leave out a part."
        larger = "Give larger batches and a larger micro_size: the compiler accumulates inside one call."
        apart = "Give parallel=DataParallel() or HSDP() and a network without AutoParallel."
        for_all = "Use ClipByGlobalNorm or ClipByValue."
        is_supported = clip is None or clip.has_one_factor or isinstance(clip, ClipByValue)
        messages = "one of float32 messages", f"reduce_dtype={dtype}", "The compiler chooses what it sends."
        names = [parameter.name for parameter in optimizer.parameters]
        # Each row: a refused condition, the argument, and the parts of the error.
        for is_refused, name, rule, got, remedy in (
            (accumulation_steps > 1, "accumulation_steps", "1", accumulation_steps, larger),
            (network.needs_all_rows, "network", "a sum over rows", "a GradCacheLoss, which takes two passes", apart),
            (drop_non_finite, "bad_micro_batch", "'skip_window'", "'drop'", one_gradient),
            (not is_supported, "clip", "one for all", repr(clip), for_all),
            (set(reduce_dtypes(dtype, names)) != {ms.float32}, "mixed_precision", *messages),
        ):
            owner = "GradAccumulation" if name == "network" else _OWNER
            require(not is_refused, owner, name, f"{rule} in semi-auto-parallel", got, remedy)
        trained = {id(parameter) for parameter in optimizer.parameters}
        left_out = [parameter.name for parameter in network.trainable_params() if id(parameter) not in trained]
        if network.micro_size > 1 and left_out:
            # The compiler expects an accumulator for each trainable parameter.
            rule, got = "one of all trainable parameters", f"one that leaves out {len(left_out)}, first {left_out[0]!r}"
            remedy = "Set requires_grad = False on those that are not to be trained, before the step is built."
            raise ValueError(argument_error(_OWNER, "optimizer", f"{rule} in semi-auto-parallel", got, remedy))
        _warn_of_differences(network)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile with these settings inside this context, and reset them afterwards."""
        # A Model has already set them for everything that it compiles.
        outside = self.auto_parallel is not None and not in_semi_auto()
        try:
            if outside:
                init_auto_parallel_context(self.auto_parallel)
            yield
        except RuntimeError as error:
            if "Cannot find micro info" not in str(error):
                raise
            # The compiler assumes that the backward pass of the first operator with a parameter ends a micro batch. A
            # cast to 16 bits is shared by all micro batches, so the compiler finds no micro batch for it.
            rule = "one whose first operator with a weight takes it as it is, in semi-auto-parallel"
            remedy = "Keep its first layer in float32, or build it with lazy_inline."
            raise ValueError(argument_error(_OWNER, "network", rule, "one that casts it to 16 bits", remedy)) from error
        finally:
            if outside:
                clear_auto_parallel_context(self.auto_parallel)
            forget_accumulation()


def _warn_of_differences(network: nn.Cell) -> None:
    """Warn of wrong gradients, of losses that are not reported, and of a backward pass that need not be linear."""
    # In a simulation, the device is a CPU.
    if ms.get_context("device_target") == "GPU" and not launches_block():
        warn(
            "For 'TrainOneStepCell', the messages of a semi-auto-parallel step must wait for the values that they "
            "send, but on GPU they do not in MindSpore 2.10, and parameters can become wrong, with MindSpore's own "
            "step, too. Call mindspore.runtime.launch_blocking() first, or use DataParallel() or HSDP()."
        )
    if network.losses is not None:
        # The compiler follows only one output of the forward pass, the loss.
        warn(
            f"For 'GradAccumulation', losses={network.losses!r} trains in semi-auto-parallel as elsewhere, but "
            f"StepOutput.other_losses stays empty there. To see the further losses, evaluate the network on a "
            f"batch, or let it print them with ops.Print."
        )
    if NetworkCode(network.network).has_own_backward():
        warn(
            "For 'TrainOneStepCell', what the network does in the backward pass (a bprop, a hook) must be linear "
            "in the gradient in semi-auto-parallel: it gets the gradient of a sum over rows, not that of a mean."
        )


def in_semi_auto() -> bool:
    """Return whether a graph that is compiled now will be partitioned."""
    return auto_parallel_context().get_parallel_mode() in _MODES


def is_semi_auto(network: nn.Cell) -> bool:
    """Return whether ``network`` is for semi-auto-parallel, which does not support CPU."""
    return device_target() != "CPU" and (isinstance(network, AutoParallel) or in_semi_auto())


def forget_accumulation() -> None:
    """Reset the compiler's number of micro batches, so that a network without accumulation compiles again."""
    if auto_parallel_context().get_grad_accumulation_step() > 1:
        auto_parallel_context().set_grad_accumulation_step(1)


def _check_settings(auto_parallel: AutoParallel | None) -> None:
    """Raise for settings of an AutoParallel or, without one, of MindSpore's context."""
    stages, is_mean, is_repeated_mean = (
        ms.get_auto_parallel_context(name) if auto_parallel is None else getattr(auto_parallel, f"_{name}")
        for name in _SETTINGS
    )
    pipeline = "Pipeline parallelism has micro batches of its own: do not call pipeline()."
    mean = "The mean is taken over the rows of all ranks, exactly; a second division would make it too small."
    repeated = "Without it each rank would count the whole loss: do not call disable_loss_repeated_mean()."
    for is_refused, rule, got, remedy in (
        (stages > 1, "in one pipeline stage", f"{stages} pipeline stages", pipeline),
        (is_mean, "without gradients_mean", "gradients_mean=True", mean),
        (not is_repeated_mean, "with loss_repeated_mean", "loss_repeated_mean=False", repeated),
    ):
        require(not is_refused, _OWNER, "network", rule, got, remedy)


@primexpr
def check_compiling(partitioned: bool) -> None:
    """Raise if a step is compiled with another kind of parallelism than it was built for."""
    if partitioned:
        got = "a graph around it that is compiled without the settings of its AutoParallel"
        remedy = "Give Model(AutoParallel(network), optimizer=optimizer)."
        require(in_semi_auto(), _OWNER, "network", "compiled as the outermost cell", got, remedy)
        _check_settings(None)
    else:
        rule, got = "a loss cell in AutoParallel", "AutoParallel around it all"
        remedy = "Put AutoParallel inside: TrainOneStepCell(AutoParallel(network), optimizer)."
        require(not in_semi_auto(), _OWNER, "network", rule, got, remedy)


@primexpr
def gradient_is_returned(micro_size: int) -> bool:
    """Return whether the gradient operator returns the reduced gradient. Otherwise the accumulators hold it."""
    # Read during compilation, since a cell may be built before the settings are active.
    return micro_size == 1 or auto_parallel_context().get_enable_parallel_optimizer()
