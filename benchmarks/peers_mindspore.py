"""The rows of MindSpore, ours among them; peers.py starts it."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import boost, nn
from mindspore.parallel.nn import GradAccumulation as StockGradAccumulation

# It knows where the sample's transformer is.
from other_kernels import InThreadPool, use_other_kernels
from transformer import Transformer
from windows import (
    AddingMicroStep,
    ForwardBackward,
    UpdateFromSums,
    adding_loop_by_hand,
    loop_by_hand,
    versions,
)
from worker import Row, serve
from workload import (
    ADDING,
    BARE,
    BARE_POOL,
    BOOST,
    FULL,
    MOMENTUM,
    OURS,
    OURS_CALLING,
    OURS_FUSED,
    OURS_OTHER_FUSED,
    OURS_OTHER_KERNELS,
    OURS_PYNATIVE,
    PYNATIVE,
    STOCK,
    TO_PYTHON,
    Workload,
    first_weights,
)

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.tools.self_test.costs import UpdateFromGiven, loop_of_bare_parts

# Of fused AssignAdd MindSpore loses the order in graphs with conditions, see docs/performance.md.
FUSION_FLAGS = "--disable_expand_ops=AssignAdd"

Step = Callable[[ms.Tensor, ms.Tensor], Any]


class TokenLoss(nn.Cell):
    """The mean cross-entropy over all tokens."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss = nn.CrossEntropyLoss()

    def construct(self, tokens: ms.Tensor, labels: ms.Tensor) -> ms.Tensor:
        logits = self.network(tokens)
        return self.loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def make_network(workload: Workload) -> nn.Cell:
    """Return the network with its loss and its first weights."""
    width = workload.width
    if workload.kind == "transformer":
        backbone = Transformer(workload.vocabulary, workload.length, width, workload.heads, workload.layers)
        network = TokenLoss(backbone)
    elif workload.kind == "mlp":
        kind = getattr(nn, workload.activation)
        backbone = nn.SequentialCell(
            [cell for _ in range(workload.layers) for cell in (nn.Dense(width, width), kind())]
        )
        network = nn.WithLossCell(backbone, nn.MSELoss())
    else:
        channels = [3, *(width * 2**i for i in range(workload.layers))]
        cells = []
        for inputs, outputs in zip(channels, channels[1:]):
            cells += [nn.Conv2d(inputs, outputs, 3, pad_mode="pad", padding=1, has_bias=True), nn.ReLU()]
            cells += [nn.MaxPool2d(2, 2)]
        cells += [nn.Flatten(), nn.Dense(channels[-1] * (32 >> workload.layers) ** 2, 10)]
        network = nn.WithLossCell(nn.SequentialCell(cells), nn.CrossEntropyLoss())
    parameters = network.trainable_params()
    arrays = first_weights((parameter.name, tuple(parameter.shape)) for parameter in parameters)
    for parameter, array in zip(parameters, arrays):
        parameter.set_data(ms.Tensor(array))
    return network.set_train()


class Boosted(ForwardBackward):
    """The step that MindSpore's boost gives a network, in its simplest form: it counts its calls by itself."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> None:
        super().__init__(network, optimizer.parameters)
        self.accumulate = boost.GradientAccumulation(micro_size, optimizer)

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> ms.Tensor:
        loss, grads = self.loss_and_grads(x, y)
        return self.accumulate(loss, grads)


def ours(network: nn.Cell, optimizer: nn.Cell, micro_size: int, may_use_thread_pool: bool = True) -> Step:
    # In PYNATIVE mode too, for OURS_PYNATIVE.
    step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer, compile=True)
    step.body.window.micro_steps.may_use_thread_pool = may_use_thread_pool
    return lambda x, y: step(x, y).loss


def full(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    return nn.TrainOneStepCell(network, optimizer)


def stock(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    # What MindSpore's own Model builds. Its step applies accumulators that only semi-auto-parallel fills.
    return ms.amp.build_train_network(StockGradAccumulation(network, micro_size), optimizer)


def boosted(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    return adding_loop_by_hand(Boosted(network, optimizer, micro_size), lambda: None, micro_size)


def to_python(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    update = UpdateFromGiven(optimizer)
    return loop_by_hand(ForwardBackward(network, optimizer.parameters), lambda grads: update(*grads), micro_size)


def adding(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    micro_step = AddingMicroStep(network, optimizer.parameters)
    return adding_loop_by_hand(micro_step, UpdateFromSums(optimizer, micro_step.sums, micro_size), micro_size)


def pynative(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    return loop_by_hand(ms.value_and_grad(network, None, optimizer.parameters), optimizer, micro_size)


BUILDERS = {
    OURS: ours,
    OURS_PYNATIVE: ours,
    OURS_OTHER_KERNELS: ours,
    OURS_FUSED: ours,
    OURS_OTHER_FUSED: ours,
    OURS_CALLING: partial(ours, may_use_thread_pool=False),
    FULL: full,
    STOCK: stock,
    BOOST: boosted,
    TO_PYTHON: to_python,
    ADDING: adding,
    PYNATIVE: pynative,
    BARE: loop_of_bare_parts,
    BARE_POOL: loop_of_bare_parts,
}


def build(workload: Workload, micro_size: int, name: str) -> Row:
    mode = ms.PYNATIVE_MODE if name in (PYNATIVE, OURS_PYNATIVE) else ms.GRAPH_MODE
    fuses = name in (OURS_FUSED, OURS_OTHER_FUSED)
    settings = {"mode": mode, "enable_graph_kernel": fuses, "graph_kernel_flags": FUSION_FLAGS}
    ms.set_context(**settings)
    network = make_network(workload)
    if name in (OURS_OTHER_KERNELS, OURS_OTHER_FUSED):
        use_other_kernels(network)
    if name == BARE_POOL:
        network = InThreadPool(network)
    weights = network.trainable_params()
    batch = tuple(ms.Tensor(array) for array in workload.batch(micro_size))
    step = BUILDERS[name](network, nn.Momentum(weights, workload.learning_rate, MOMENTUM), micro_size)

    def run() -> float | None:
        ms.set_context(**settings)
        loss = step(*batch)
        weights[0].asnumpy()  # waits for the update
        return None if loss is None else float(loss.asnumpy())

    return Row(run, lambda: [weight.asnumpy() for weight in weights])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Fused kernels are built there, and a log is written.
        os.chdir(folder)
        serve(build, versions())
