"""The rows of MindSpore, ours among them; peers.py starts it."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import windows
from mindspore import nn
from worker import Row, serve
from workload import ADDING, BARE, FULL, MOMENTUM, OURS, OURS_PYNATIVE, PYNATIVE, Workload, first_weights

from ms_gradaccum import GradAccumulation, TrainOneStepCell

sys.path.append(str(Path(__file__).resolve().parents[1] / "sample_code" / "transformer_lm"))
from transformer import Transformer  # noqa: E402

Step = Callable[[ms.Tensor, ms.Tensor], Any]


def make_network(workload: Workload) -> nn.Cell:
    """Return the network with its loss and its first weights."""
    width = workload.width
    if workload.kind == "transformer":
        backbone = Transformer(workload.vocabulary, workload.length, width, workload.heads, workload.layers)
        network = windows.TokenLoss(backbone)
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


def ours(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    # In PYNATIVE mode too, for OURS_PYNATIVE.
    step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer, compile=True)
    return lambda x, y: step(x, y).loss


def adding(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    micro_step = windows.AddingMicroStep(network, optimizer.parameters)
    return windows.adding_loop_by_hand(
        micro_step, windows.UpdateFromSums(optimizer, micro_step.sums, micro_size), micro_size
    )


def pynative(network: nn.Cell, optimizer: nn.Cell, micro_size: int) -> Step:
    return windows.loop_by_hand(ms.value_and_grad(network, None, optimizer.parameters), optimizer, micro_size)


BUILDERS = {
    OURS: ours,
    OURS_PYNATIVE: ours,
    FULL: lambda network, optimizer, micro_size: nn.TrainOneStepCell(network, optimizer),
    ADDING: adding,
    PYNATIVE: pynative,
    BARE: windows.loop_of_bare_parts,
}


def build(workload: Workload, micro_size: int, name: str) -> Row:
    mode = ms.PYNATIVE_MODE if name in (PYNATIVE, OURS_PYNATIVE) else ms.GRAPH_MODE
    ms.set_context(mode=mode)
    network = make_network(workload)
    weights = network.trainable_params()
    batch = tuple(ms.Tensor(array) for array in workload.batch())
    step = BUILDERS[name](network, nn.Momentum(weights, workload.learning_rate, MOMENTUM), micro_size)

    def run() -> float | None:
        ms.set_context(mode=mode)
        loss = step(*batch)
        weights[0].asnumpy()  # waits for the update
        return None if loss is None else float(loss.asnumpy())

    return Row(run, lambda: [weight.asnumpy() for weight in weights])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        serve(build, windows.versions())
