"""The rows of PyTorch and Accelerate; peers.py starts it with the Python of an environment that has them."""

import sys
from collections.abc import Callable, Iterable

import accelerate
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from worker import Row, serve
from workload import ACCELERATE, MOMENTUM, TORCH, Workload, first_weights

# MindSpore's own.
EPSILON = 1e-7

Batches = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]


def activation(workload: Workload) -> nn.Module:
    # The formula with tanh, which is MindSpore's default.
    return nn.GELU(approximate="tanh") if workload.activation == "GELU" else nn.ReLU()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        query, key, value = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.norm1, self.norm2 = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)
        self.attention = Attention(width, workload.heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation(workload), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(workload.length, workload.width))
        self.tokens = nn.Embedding(workload.vocabulary, workload.width)
        self.blocks = nn.Sequential(*[Block(workload) for _ in range(workload.layers)])
        self.norm = nn.LayerNorm(workload.width, EPSILON)
        self.head = nn.Linear(workload.width, workload.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


def make_network(workload: Workload) -> nn.Module:
    if workload.kind == "transformer":
        return Transformer(workload)
    layers: list[nn.Module] = []
    width = workload.width
    if workload.kind == "mlp":
        for _ in range(workload.layers):
            layers += [nn.Linear(width, width), activation(workload)]
        return nn.Sequential(*layers)
    channels = [3, *(width * 2**i for i in range(workload.layers))]
    for inputs, outputs in zip(channels, channels[1:]):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * (32 >> workload.layers) ** 2, 10))


def loss_of(network: nn.Module, workload: Workload, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if workload.kind == "mlp":
        return functional.mse_loss(network(x), y)
    return functional.cross_entropy(network(x), y.flatten())


def bare_row(network: nn.Module, workload: Workload, micro_size: int, batches: Batches) -> Row:
    optimizer = torch.optim.SGD(network.parameters(), workload.learning_rate, MOMENTUM)

    def run() -> float:
        total = 0.0
        for x, y in batches():
            loss = loss_of(network, workload, x, y) / micro_size
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return Row(run, weights_of(network))


def accelerate_row(network: nn.Module, workload: Workload, micro_size: int, batches: Batches) -> Row:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_size)
    optimizer = torch.optim.SGD(network.parameters(), workload.learning_rate, MOMENTUM)
    model, optimizer = accelerator.prepare(network, optimizer)

    def run() -> float:
        total = 0.0
        for x, y in batches():
            with accelerator.accumulate(model):
                loss = loss_of(model, workload, x, y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        return float(total) / micro_size

    return Row(run, weights_of(network))


def weights_of(network: nn.Module) -> Callable[[], list]:
    return lambda: [parameter.detach().numpy() for parameter in network.parameters()]


BUILDERS = {TORCH: bare_row, ACCELERATE: accelerate_row}


def build(workload: Workload, micro_size: int, name: str) -> Row:
    x, y = (torch.from_numpy(array) for array in workload.batch())
    y = y if workload.kind == "mlp" else y.long()
    network = make_network(workload)
    arrays = first_weights((name, tuple(parameter.shape)) for name, parameter in network.named_parameters())
    with torch.no_grad():
        for parameter, array in zip(network.parameters(), arrays):
            parameter.copy_(torch.from_numpy(array))
    return BUILDERS[name](network, workload, micro_size, lambda: zip(x.chunk(micro_size), y.chunk(micro_size)))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve(build, f"PyTorch {torch.__version__}, Accelerate {accelerate.__version__}")
