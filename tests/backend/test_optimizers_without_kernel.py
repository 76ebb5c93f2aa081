"""Optimizers with an operator that has no CPU kernel: they compile, and say what the device lacks."""

import mindspore as ms
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.common.api import _cell_graph_executor
from optimizer_parity import RowLoss, accumulated_step, batches, dense, one_layer
from refusal import refuses
from step_probe import operators

from ms_gradaccum import TrainOneStepCell

# By the name of the operator that has no kernel.
WITHOUT_KERNEL = {
    "Lamb": lambda network: nn.Lamb(network.trainable_params(), 0.1, weight_decay=0.1),
    "LARSUpdate": lambda network: nn.LARS(
        nn.Momentum(network.trainable_params(), 0.1, 0.9), coefficient=0.1, lars_filter=lambda _: True
    ),
    "AdamW": lambda network: mint.optim.AdamW(network.trainable_params(), 0.1, eps=1.0),
}


@pytest.mark.parametrize("operator", WITHOUT_KERNEL)
def test_optimizers_without_a_kernel_are_part_of_the_compiled_step(operator):
    ms.set_context(mode=ms.GRAPH_MODE)
    network = one_layer()
    optimizer = WITHOUT_KERNEL[operator](network)
    step = accumulated_step(network, optimizer, micro_size=2)
    inputs = [Tensor(part) for part in batches()[0]]
    # The compiler's front end does not ask for kernels in a phase of this name.
    step.phase = "export.train"
    graph_id, _ = _cell_graph_executor.compile(step, *inputs, phase=step.phase)
    assert operators(step, graph_id).count(operator) == len(optimizer.parameters)


def test_thor_is_refused_for_its_statistics_of_the_whole_batch():
    network = RowLoss(nn.SequentialCell(dense(3, 2, 0.2, 0.6, seed=2)))
    optimizer = nn.thor(network.backbone, Tensor([0.1, 0.1]), Tensor([0.1, 0.1]), momentum=0.9)
    with refuses(ValueError, "'optimizer'", "but got thor"):
        accumulated_step(network, optimizer, micro_size=2)


@pytest.mark.parametrize("compile", [None, True])
def test_adamw_of_mint_is_told_what_the_device_lacks_and_not_what_the_user_has(compile, recwarn):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.Dense(3, 1)
    cell = nn.WithLossCell(network, nn.MSELoss())
    step = TrainOneStepCell(cell, mint.optim.AdamW(network.trainable_params(), 0.1), compile=compile)
    # Op by op MindSpore raises where it next waits for its threads, which may be outside of a graph.
    lacks = r"The kernel AdamW unregistered|Unsupported op \[AdamW\] on CPU"
    if compile:
        lacks = rf"^For 'TrainOneStepCell', .* ({lacks})\. No parameter was changed\. Use another device, "
    with pytest.raises(RuntimeError, match=lacks):
        step(ops.ones((2, 3)), ops.ones((2, 1)))
    said = [str(each.message) for each in recwarn if "mindspore.mint" in str(each.message)]
    assert len(said) == (compile is None) and all("has no kernel on CPU" in each for each in said)
