"""The settings of several processes, in one, and a network with hooks that reduce: there is nothing to send."""

from types import SimpleNamespace

import mindspore as ms
import mindspore.experimental.optim as experimental
import pytest
from linear_toy import descend, line, mse, sgd, weight_of
from loop_toy import FOUR
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses, warns

from ms_gradaccum import HSDP, Accumulator, DataParallel, TrainOneStepCell
from ms_gradaccum.parallel.factory import check_parameters_sent
from ms_gradaccum.parallel.shards import check_shardable


@pytest.mark.parametrize(
    "kind, name, value, error",
    [
        (HSDP, "shard_size", 0, ValueError),
        (HSDP, "shard_size", -2, ValueError),
        (HSDP, "shard_size", True, TypeError),
        (HSDP, "threshold", -1, ValueError),
        (HSDP, "threshold", "64", TypeError),
        (HSDP, "optimizer_level", "level4", ValueError),
        (HSDP, "optimizer_level", 1, TypeError),
        (DataParallel, "sync_each_batch", "yes", TypeError),
        (DataParallel, "overlap", True, TypeError),
        (DataParallel, "check_weights", None, TypeError),
    ],
)
def test_wrong_settings_are_refused(kind, name, value, error):
    with refuses(error, f"'{name}'"):
        kind(**{name: value})


class Rows(nn.Momentum):
    """Its state has other shapes."""

    def __init__(self, weights):
        super().__init__(weights, 0.1, 0.9)
        self.row_norms = weights[1].clone()
        self.row_norms.name = "row_norms"


def with_state_in_a_dict(weights):
    """Slices would replace the parameters alone."""
    optimizer = nn.SGD(weights)
    optimizer.state = {"weight": {"average": Parameter(ops.ones((2, 2)), "average.weight")}}
    return optimizer


def around_another_one(weights):
    """The one inside would update whole parameters with this rank's rows of their gradients."""
    optimizer = nn.SGD(weights)
    optimizer.inner = nn.AdamWeightDecay(optimizer.parameters)
    return optimizer


@pytest.mark.parametrize(
    "build, key",
    [
        (lambda weights: nn.Lamb(weights, 0.1), "looks at whole"),
        (lambda weights: nn.LARS(nn.Momentum(weights, 0.1, 0.9)), "looks at whole"),
        (lambda weights: nn.AdaFactor(weights, 0.1, scale_parameter=False, relative_step=False), "looks at whole"),
        (Rows, "but got Rows with the state 'row_norms' of shape (2,)"),
        (with_state_in_a_dict, "but got SGD with the state 'average.weight' of shape (2, 2)"),
        (around_another_one, "Use an optimizer that works"),
    ],
)
def test_optimizers_that_do_not_work_element_by_element_are_refused(build, key):
    with refuses(ValueError, "'optimizer'", key):
        check_shardable(build(nn.Dense(2, 2).trainable_params()))


class ClippedSGD(nn.SGD):
    def construct(self, grads):
        return super().construct(ops.clip_by_global_norm(grads, 1.0))


class DecayedSGD(nn.SGD):
    def construct(self, grads):
        return super().construct(tuple(grad + 0.1 * weight for grad, weight in zip(grads, self.parameters)))


def test_an_optimizer_whose_code_takes_a_norm_is_reported():
    """Each rank would clip by the norm of its own rows, and train another thing than one process."""
    weights = nn.Dense(2, 2).trainable_params()
    with warns("optimizer must work"):
        check_shardable(ClippedSGD(weights, 0.1))


@pytest.mark.parametrize("kind", [DecayedSGD, nn.SGD, nn.AdamWeightDecay, nn.FTRL, experimental.AdamW])
def test_an_optimizer_that_works_element_by_element_is_taken_in_silence(kind, recwarn):
    check_shardable(kind(nn.Dense(2, 2).trainable_params()))
    assert not recwarn.list


def test_float64_parameters_cannot_be_added_up_over_processes():
    parameters = [Parameter(Tensor([1.0], ms.float32), "small"), Parameter(Tensor([1.0], ms.float64), "large")]
    check_parameters_sent("TrainOneStepCell", parameters[:1])
    with refuses(ValueError, "'network'", "parameters in several"):
        check_parameters_sent("TrainOneStepCell", parameters)


@pytest.mark.parametrize("build", [TrainOneStepCell, Accumulator])
@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_what_the_compiler_would_partition_is_refused_on_cpu(mode, build):
    network = nn.WithLossCell(nn.Dense(1, 1), nn.MSELoss())
    ms.set_auto_parallel_context(parallel_mode=mode)
    try:
        with refuses(ValueError, "semi-auto-parallel mode"):
            build(network, sgd(network, 0.1))
    finally:
        ms.reset_auto_parallel_context()


def test_the_scale_of_a_network_that_reduces_its_gradients_is_undone_in_one_process(eager):
    network = line()
    network.weight.register_hook(lambda grad: grad * 0.125)
    network.hsdp_scheduler = SimpleNamespace(
        config=SimpleNamespace(grad_scale=0.125),
        requires_acc_grad=False,
        set_requires_grad_sync=lambda is_synced: None,
        zero_grads=lambda: None,
        hsdp_state=SimpleNamespace(shard=lambda: None),
    )
    accumulator = Accumulator(mse(network), sgd(network), 2)
    for each in FOUR[:2]:
        with accumulator.accumulate():
            accumulator.backward(*each)
            output = accumulator.step()
    assert weight_of(network) == pytest.approx(descend((1, 2, 3, 4)), rel=1e-6)
    assert output.weight == 4
