"""The forward pass of a whole batch in micro batches, in a form in which the compiler recognises accumulation."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_gradaccum.backend.mindspore_private import primexpr
from ms_gradaccum.batch.split import BatchAxis, Shape, split_shapes


class BatchSums(nn.Cell):
    """The loss sum and the weight of a batch as one tensor, since the compiler partitions a single output."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.micro_size = network.micro_size
        self.batch_axis = network.batch_axis
        self.weighted_loss = network.loss_of()
        # One primitive per micro batch, or the compiler would merge them.
        self.cuts = [
            ops.StridedSlice().add_prim_attr("grad_accu_num", self.micro_size)
            for _ in range(self.micro_size)
        ]
        # These mark the end of each micro batch. With `lazy_inline`, the forward pass is one function for all micro
        # batches: without the marks, the compiler could not tell their backward passes apart.
        marked = [ops.Add().add_prim_attr("forward_end", i) for i in range(self.micro_size)]
        self.joins = marked if self.micro_size > 1 else [ops.Add()]
        # Without this sharding the compiler would put one of the two elements on each of two devices.
        self.at_place = ops.Mul().shard(((), (1,)))
        self.add_places = ops.Add().shard(((1,), (1,)))
        self._get_attr_from_cell(network)

    def construct(self, *inputs: object) -> Tensor:
        shapes: tuple[object, ...] = ()
        for item in inputs:
            shapes += (item.shape if isinstance(item, Tensor) else None,)
        rows, bounds = _cut_bounds(shapes, self.batch_axis, self.micro_size)
        loss_sum = Tensor(0.0, ms.float32)
        weight: Tensor | None = None
        for i, cut in enumerate(self.cuts):
            part: tuple[object, ...] = (Tensor(rows, ms.float32),)
            for item, bound in zip(inputs, bounds[i]):
                part += (item if bound is None else cut(item, *bound),)
            part_sum, part_weight = self.weighted_loss(*part)
            loss_sum = self.joins[i](loss_sum, part_sum)
            weight = part_weight if weight is None else weight + part_weight
        first = self.at_place(loss_sum, Tensor([1.0, 0.0], ms.float32))
        return self.add_places(
            first, self.at_place(ops.stop_gradient(weight), Tensor([0.0, 1.0], ms.float32))
        )


@primexpr
def _cut_bounds(
    shapes: tuple[Shape, ...], batch_axis: BatchAxis, micro_size: int
) -> tuple[int, tuple[object, ...]]:
    """Return the rows of a micro batch, and for each the begin, end and step of each input (None: not cut)."""
    axes, rows = split_shapes(shapes, batch_axis, micro_size)
    for axis, shape in zip(axes, shapes):
        if axis is not None and shape is not None and axis % len(shape) != 0:
            raise ValueError(
                f"For 'GradAccumulation', the argument 'batch_axis' must be 0 or None for each "
                f"input in semi-auto-parallel, but got {axis}. Transpose that input."
            )
    count = rows[-1][1]
    if len(rows) != micro_size or count % micro_size != 0:
        raise ValueError(
            f"For 'GradAccumulation', the argument 'micro_size' must divide the {count} rows of "
            f"the batch of all devices in semi-auto-parallel, but got {micro_size}. Choose another "
            f"micro_size, or drop the last rows."
        )
    bounds = []
    for begin, end in rows:
        part: list[object] = []
        for axis, shape in zip(axes, shapes):
            is_cut = axis is not None and micro_size > 1
            part.append(_bound(shape, begin, end) if is_cut else None)
        bounds.append(tuple(part))
    return count // micro_size, tuple(bounds)


def _bound(shape: Shape, begin: int, end: int) -> object:
    rest = tuple(shape or ())[1:]
    return (begin, *[0] * len(rest)), (end, *rest), (1,) * (len(rest) + 1)
