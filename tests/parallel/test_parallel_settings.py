"""The settings of several processes, in one."""

import re

import mindspore as ms
import mindspore.experimental.optim as experimental
import pytest
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses, warns

from ms_gradaccum import HSDP, Accumulator, DataParallel, TrainOneStepCell
from ms_gradaccum.parallel.factory import check_parameters_sent
from ms_gradaccum.parallel.shards import check_shardable

SIZE = "For 'HSDP', the argument 'shard_size' must be an int of at least 1 or -1, but got "
THRESHOLD = "For 'HSDP', the argument 'threshold' must be an int of at least 0, but got "
LEVEL = "For 'HSDP', the argument 'optimizer_level' must be one of 'level1', 'level2', 'level3', but got "


@pytest.mark.parametrize(
    "kind,settings,error,text",
    [
        (HSDP, {"shard_size": 0}, ValueError, f"{SIZE}0. -1 means all ranks."),
        (HSDP, {"shard_size": -2}, ValueError, f"{SIZE}-2. -1 means all ranks."),
        (HSDP, {"shard_size": 2.0}, TypeError, f"{SIZE}2.0 of type float. -1 means all ranks."),
        (HSDP, {"shard_size": True}, TypeError, f"{SIZE}True of type bool. -1 means all ranks."),
        (HSDP, {"threshold": -1}, ValueError, f"{THRESHOLD}-1. It is in KB."),
        (HSDP, {"threshold": "64"}, TypeError, f"{THRESHOLD}'64' of type str. It is in KB."),
        (HSDP, {"optimizer_level": "level4"}, ValueError, f"{LEVEL}'level4'."),
        (HSDP, {"optimizer_level": 1}, TypeError, f"{LEVEL}1"),
        (HSDP, {"check_weights": 1}, TypeError, "For 'HSDP', the argument 'check_weights' must be a bool, but got 1"),
        (
            DataParallel,
            {"sync_each_batch": "yes"},
            TypeError,
            "For 'DataParallel', the argument 'sync_each_batch' must be a bool, but got 'yes'",
        ),
        (
            DataParallel,
            {"overlap": True},
            TypeError,
            "DataParallel.__init__() got an unexpected keyword argument 'overlap'",
        ),
        (
            DataParallel,
            {"check_weights": None},
            TypeError,
            "For 'DataParallel', the argument 'check_weights' must be a bool, but got None",
        ),
    ],
)
def test_wrong_settings_are_refused(kind, settings, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        kind(**settings)


@pytest.mark.parametrize(
    "build",
    [
        lambda weights: nn.Lamb(weights, 0.1),
        lambda weights: nn.LARS(nn.Momentum(weights, 0.1, 0.9)),
        lambda weights: nn.AdaFactor(weights, 0.1, scale_parameter=False, relative_step=False),
    ],
)
def test_optimizers_that_look_at_whole_parameters_are_refused(build):
    optimizer = build(nn.Dense(2, 2).trainable_params())
    with refuses(ValueError, "'optimizer'", "looks at whole"):
        check_shardable(optimizer)


def test_an_optimizer_whose_state_has_other_shapes_is_refused():
    class Rows(nn.Momentum):
        def __init__(self, weights):
            super().__init__(weights, 0.1, 0.9)
            self.row_norms = weights[1].clone()
            self.row_norms.name = "row_norms"

    network = nn.Dense(2, 3)
    with pytest.raises(ValueError, match=r"but got Rows with the state 'row_norms' of shape \(3,\)"):
        check_shardable(Rows(network.trainable_params()))


def test_an_optimizer_whose_state_is_in_a_dict_is_refused():
    """Slices would replace the parameters alone."""
    optimizer = nn.SGD(nn.Dense(2, 2).trainable_params())
    optimizer.state = {"weight": {"average": Parameter(ops.ones((2, 2)), "average.weight")}}
    with pytest.raises(ValueError, match=r"but got SGD with the state 'average.weight' of shape \(2, 2\)"):
        check_shardable(optimizer)


def test_an_optimizer_around_another_one_is_refused():
    """The one inside would update whole parameters with this rank's rows of their gradients."""
    optimizer = nn.SGD(nn.Dense(2, 2).trainable_params())
    optimizer.inner = nn.AdamWeightDecay(optimizer.parameters)
    with refuses(ValueError, "Use an optimizer that works"):
        check_shardable(optimizer)


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
            build(network, nn.SGD(network.trainable_params(), 0.1))
    finally:
        ms.reset_auto_parallel_context()
