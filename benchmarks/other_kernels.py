"""The same mathematics by other operators or threads, where MindSpore's choice on CPU is slow.

Same weights, same results but for rounding. What each of them saves is in README.md.
"""

import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn, ops

sys.path.append(str(Path(__file__).resolve().parents[1] / "sample_code" / "transformer_lm"))
from transformer import Attention


class SigmoidGELU(nn.Cell):
    """What nn.GELU() computes, written out: (1 + tanh(z)) / 2 is sigmoid(2 z).

    Not with ops.tanh, whose kernel for CPU is off by up to 1e-4.
    """

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return x * ops.sigmoid(x * (1.5957691216 + 0.0713548162 * ops.square(x)))


class Linear(nn.Cell):
    """What nn.Dense() computes; the gradient of its bias by ReduceSum, which is 5 times as fast as BiasAddGrad."""

    def __init__(self) -> None:
        super().__init__()
        self.product = ops.MatMul(transpose_b=True)
        self.add_bias = ops.BiasAdd()
        self.input_grad = ops.MatMul()
        self.weight_grad = ops.MatMul(transpose_a=True)
        self.sum_rows = ops.ReduceSum()

    def construct(self, x: ms.Tensor, weight: ms.Tensor, bias: ms.Tensor) -> ms.Tensor:
        return self.add_bias(self.product(x, weight), bias)

    def bprop(
        self, x: ms.Tensor, weight: ms.Tensor, bias: ms.Tensor, out: ms.Tensor, dout: ms.Tensor
    ) -> tuple[ms.Tensor, ...]:
        return self.input_grad(dout, weight), self.weight_grad(dout, x), self.sum_rows(dout, 0)


class OtherDense(nn.Cell):
    """A Dense with a bias, by `Linear`."""

    def __init__(self, dense: nn.Dense) -> None:
        super().__init__(auto_prefix=False)
        self.dense = dense
        self.linear = Linear()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.linear(rows, self.dense.weight, self.dense.bias).reshape((*x.shape[:-1], -1))


class SplitAttention(nn.Cell):
    """The sample's attention with query, key and value split before they are transposed, not picked by an index."""

    def __init__(self, attention: Attention) -> None:
        super().__init__(auto_prefix=False)
        self.attention = attention

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.attention.heads, self.attention.head_width)
        query, key, value = ops.split(self.attention.qkv(x), width, -1)
        query, key, value = self.turned(query, shape), self.turned(key, shape), self.turned(value, shape)
        scores = ops.matmul(query * self.attention.scale, key.swapaxes(-1, -2)) + self.attention.mask
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.attention.out(mixed.swapaxes(1, 2).reshape(rows, length, width))

    def turned(self, part: ms.Tensor, shape: tuple[int, ...]) -> ms.Tensor:
        return part.reshape(shape).swapaxes(1, 2)


class AdaptivePool(nn.Cell):
    """A max pooling whose windows neither overlap nor leave anything out, by the kernel for pooling to a given size.

    ``pool`` has a stride as large as its kernel and no padding, and the sides of an image are multiples of it.
    """

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.side = pool.stride

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return ops.adaptive_max_pool2d(x, (x.shape[2] // self.side, x.shape[3] // self.side))


class InThreadPool(nn.Cell):
    """A loss cell whose graph MindSpore's threads run, since it has a condition, instead of the thread that calls it.

    Otherwise that one runs a graph of at most 100 kernels on a machine of less than 12 cores. It has no part in a
    kernel of several threads, but looks all the time whether it has ended, which takes a core from them.
    """

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs: ms.Tensor) -> ms.Tensor:
        loss = self.network(*inputs)
        if ops.stop_gradient(loss) < -1e30:  # never
            loss = loss + 0.0
        return loss


REPLACED = {
    nn.Dense: lambda cell: OtherDense(cell) if cell.has_bias else cell,
    nn.GELU: lambda cell: SigmoidGELU(),
    # The gradient of MaxPool runs the pooling forward again, both in a kernel of oneDNN for any case.
    nn.MaxPool2d: lambda cell: AdaptivePool(cell) if cell.kernel_size == cell.stride == 2 else cell,
    Attention: SplitAttention,
}


def use_other_kernels(network: nn.Cell) -> None:
    """Put others in the place of the cells that have slow kernels."""
    for _, parent in list(network.cells_and_names()):
        for name, cell in list(parent.name_cells().items()):
            if type(cell) not in REPLACED:
                continue
            new = REPLACED[type(cell)](cell)
            if isinstance(parent, nn.SequentialCell):
                parent[int(name)] = new
            else:
                setattr(parent, name, new)
    # Cells that have moved have given their parameters other names, some of them twice.
    for name, parameter in network.parameters_and_names():
        parameter.name = name
