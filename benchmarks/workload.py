"""Names of the peers and their workload: sizes, data and first weights, the same for all frameworks."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

OURS = "ours, GRAPH"
OURS_PYNATIVE = "ours, PYNATIVE"
FULL = "stock, full batch"
ADDING = "GRAPH loop, compiled assign_add"
PYNATIVE = "PYNATIVE loop, value_and_grad"
BARE = "bare parts of our window"
TORCH = "PyTorch, bare loop"
ACCELERATE = "Accelerate"
MINDSPORE_ROWS = OURS, OURS_PYNATIVE, FULL, ADDING, PYNATIVE, BARE
TORCH_ROWS = (TORCH, ACCELERATE)

# Of SGD.
MOMENTUM = 0.9


class Workload(NamedTuple):
    """A network and the rows of its window."""

    kind: str
    rows: int
    width: int
    layers: int
    activation: str = "ReLU"
    length: int = 64
    vocabulary: int = 128

    def __str__(self) -> str:
        what = {
            "mlp": f"{self.layers} x (Dense({self.width}), {self.activation})",
            "transformer": f"causal transformer, {self.layers} blocks of width {self.width}, {self.activation}, "
            f"{self.length} tokens",
            "conv": f"{self.layers} x (Conv2d(3 x 3), ReLU, MaxPool2d) from {self.width} channels on, 32 x 32 images",
        }[self.kind]
        return f"{what}, batch of {self.rows} rows"

    @property
    def learning_rate(self) -> float:
        """Large enough for the weights to move by much more than float32 rounds off."""
        return 5.0 if self.kind == "mlp" else 0.5

    @property
    def heads(self) -> int:
        return self.width // 64

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of one window."""
        random = np.random.default_rng(0)
        if self.kind == "transformer":
            shape = (self.rows, self.length)
            return tuple(random.integers(0, self.vocabulary, shape, np.int32) for _ in range(2))
        if self.kind == "conv":
            images = random.standard_normal((self.rows, 3, 32, 32), np.float32)
            return images, random.integers(0, 10, self.rows, np.int32)
        return tuple(random.standard_normal((self.rows, self.width), np.float32) for _ in range(2))


def first_weights(parameters: Iterable[tuple[str, tuple[int, ...]]]) -> list[np.ndarray]:
    """Return what parameters of these names and shapes begin with; their order is the same in all frameworks."""
    random = np.random.default_rng(1)
    weights = []
    for name, shape in parameters:
        inputs = int(np.prod(shape[1:])) if len(shape) > 1 else 100
        drawn = random.standard_normal(shape, np.float32) * np.float32((2 / inputs) ** 0.5)
        weights.append(drawn + 1 if re.search(r"norm\w*\.(weight|gamma)$", name) else drawn)
    return weights


WORKLOADS = {
    "mlp_relu": Workload("mlp", 2048, 512, 6),
    "mlp_gelu": Workload("mlp", 2048, 512, 6, "GELU"),
    "transformer": Workload("transformer", 64, 128, 2, "GELU"),
    "conv": Workload("conv", 256, 16, 3),
}
