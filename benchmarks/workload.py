"""What the peers are called and what they train: sizes, data and first weights, the same for all frameworks."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

OURS = "ours, GRAPH"
OURS_PYNATIVE = "ours, PYNATIVE"
OURS_OTHER_KERNELS = "ours, GRAPH, other kernels"
OURS_FUSED = "ours, GRAPH, fused kernels"
OURS_OTHER_FUSED = "ours, GRAPH, other kernels, fused"
OURS_CALLING = "ours, GRAPH, calling thread"
FULL = "stock, full batch"
STOCK = "stock GradAccumulation"
BOOST = "boost GradientAccumulation"
TO_PYTHON = "GRAPH loop, gradients to Python"
ADDING = "GRAPH loop, compiled assign_add"
PYNATIVE = "PYNATIVE loop, value_and_grad"
BARE = "bare parts of our window"
BARE_POOL = "bare parts, thread pool"
TORCH = "PyTorch, bare loop"
ACCELERATE = "Accelerate"
MINDSPORE_ROWS = (
    *(OURS, OURS_CALLING, OURS_OTHER_KERNELS, OURS_FUSED, OURS_OTHER_FUSED, OURS_PYNATIVE),
    *(FULL, STOCK, BOOST, TO_PYTHON, ADDING, PYNATIVE, BARE, BARE_POOL),
)
TORCH_ROWS = (TORCH, ACCELERATE)
# They run each kernel once a window.
UNSPLIT = (FULL, STOCK)

# Of SGD.
MOMENTUM = 0.9


class Workload(NamedTuple):
    """A network and the rows of its window; ``per_micro_batch`` says that they are those of a micro batch instead."""

    kind: str
    rows: int
    width: int
    layers: int
    activation: str = "ReLU"
    length: int = 64
    vocabulary: int = 128
    per_micro_batch: bool = False

    def __str__(self) -> str:
        what = {
            "mlp": f"{self.layers} x (Dense({self.width}), {self.activation})",
            "transformer": f"causal transformer, {self.layers} blocks of width {self.width}, {self.activation}, "
            f"{self.length} tokens",
            "conv": f"{self.layers} x (Conv2d(3 x 3), ReLU, MaxPool2d) from {self.width} channels on, 32 x 32 images",
        }[self.kind]
        return f"{what}, {'micro batches' if self.per_micro_batch else 'batch'} of {self.rows} rows"

    @property
    def learning_rate(self) -> float:
        """Large enough for the weights to move by much more than float32 rounds off."""
        return 5.0 if self.kind == "mlp" else 0.5

    @property
    def has_slow_kernels(self) -> bool:
        """Whether there is a row for the network of other_kernels.py."""
        return not self.per_micro_batch

    @property
    def heads(self) -> int:
        return self.width // 64

    def batch(self, micro_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of one window."""
        random = np.random.default_rng(0)
        rows = self.rows * (micro_size if self.per_micro_batch else 1)
        if self.kind == "transformer":
            shape = (rows, self.length)
            return tuple(random.integers(0, self.vocabulary, shape, np.int32) for _ in range(2))
        if self.kind == "conv":
            images = random.standard_normal((rows, 3, 32, 32), np.float32)
            return images, random.integers(0, 10, rows, np.int32)
        return tuple(random.standard_normal((rows, self.width), np.float32) for _ in range(2))


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
    # Micro steps of about 10 ms whose gradients are of different sizes.
    "step_256": Workload("mlp", 512, 256, 6, per_micro_batch=True),
    "step_512": Workload("mlp", 128, 512, 6, per_micro_batch=True),
    "step_1024": Workload("mlp", 32, 1024, 6, per_micro_batch=True),
    "tiny": Workload("mlp", 4, 8, 2, per_micro_batch=True),
}
