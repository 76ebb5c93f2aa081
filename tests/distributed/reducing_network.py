"""A network whose hooks reduce its gradients and cut its parameters, with the protocol of HyperParallel's hsdp."""

from types import SimpleNamespace

import mindspore as ms
from mindspore import Tensor, mint, nn, ops
from mindspore.communication import get_group_size, get_rank
from scenarios import build_network


class Scheduler:
    """The scheduler of the cell: it counts the messages of the hooks in `sent`.

    An all-reduce of the world stands in for a reduce-scatter and an all-gather, which the CPU lacks op by op.
    """

    def __init__(self, cell, level, shard_size, accumulates, scale):
        self.config = SimpleNamespace(grad_scale=scale)
        self.requires_acc_grad = accumulates
        self.hsdp_state = SimpleNamespace(shard=self.cut)
        self.level, self.is_synced, self.is_whole, self.sent = level, False, False, []
        self.rank, self.size = get_rank(), get_group_size()
        self.all_reduce = ops.AllReduce()
        self.shards, self.sums = [], {}
        for parameter in cell.trainable_params():
            size = shard_size if parameter.shape[0] % shard_size == 0 else 1
            parameter.hsdp_effective_shard_size = size
            parameter.register_hook(lambda grad, own=parameter: self.reduced(own, grad))
            if size > 1:
                self.shards.append(parameter)
                parameter.set_data(self.own_rows(parameter, Tensor(parameter.asnumpy())), slice_shape=True)
        cell.register_forward_pre_hook(self.before_forward)
        cell.register_backward_hook(self.after_backward)
        if level == 3:
            cell.register_forward_hook(lambda *_: self.cut())
            cell.register_backward_pre_hook(lambda *_: self.gather())

    def own_rows(self, parameter, tensor):
        size = parameter.hsdp_effective_shard_size
        rows = tensor.shape[0] // size
        begin = self.rank % size * rows
        return tensor[begin : begin + rows] + 0

    def send(self, what, tensor):
        self.sent.append(what)
        return self.all_reduce(tensor)

    def before_forward(self, cell, inputs):
        inputs[0].requires_grad_()
        self.gather()

    def gather(self):
        for parameter in [] if self.is_whole else self.shards:
            size = parameter.hsdp_effective_shard_size
            own = Tensor(parameter.asnumpy()) * (size / self.size)
            rows = [own if i == self.rank % size else ops.zeros_like(own) for i in range(size)]
            parameter.set_data(self.send("gather", ops.concat(rows)), slice_shape=True)
        self.is_whole = True

    def cut(self):
        for parameter in self.shards if self.is_whole else []:
            parameter.set_data(self.own_rows(parameter, Tensor(parameter.asnumpy())), slice_shape=True)
        self.is_whole = False

    def after_backward(self, *_):
        if self.level == 3 or not self.requires_acc_grad or self.is_synced:
            self.cut()

    def reduced(self, parameter, grad):
        size = parameter.hsdp_effective_shard_size
        shards_first = self.requires_acc_grad and self.level > 1 and size == self.size
        if not self.requires_acc_grad or shards_first:
            grad = self.own_rows(parameter, self.send("reduce", grad))
        if self.requires_acc_grad:
            name = parameter.name
            grad = self.sums[name] = self.sums[name] + grad if name in self.sums else grad
            if self.is_synced and not shards_first:
                grad = self.own_rows(parameter, self.send("reduce", grad))
        return grad * self.config.grad_scale

    def set_requires_grad_sync(self, is_synced):
        self.is_synced = is_synced

    def zero_grads(self):
        self.sums.clear()

    def whole(self, parameter):
        self.gather()
        values = parameter.asnumpy()
        self.cut()
        return values


def reduce_itself(cell, level=1, shard_size=1, accumulates=False, scale=1.0):
    cell.hsdp_scheduler = Scheduler(cell, level, shard_size, accumulates, scale)
    return cell


def whole_weights(cell):
    arrays = [cell.hsdp_scheduler.whole(parameter) for parameter in cell.trainable_params()]
    return [float(value) for array in arrays for value in array.ravel()]


def build_layers():
    """The network of `build_network`, of layers whose parameters may change their shapes.

    nn.Dense computes with the shape of a bias that an optimizer has seen.
    """
    layers = [mint.nn.Linear(6, 8), nn.Tanh(), mint.nn.Linear(8, 8), nn.Tanh(), mint.nn.Linear(8, 3)]
    network = nn.SequentialCell(*layers)
    for weight, like in zip(network.trainable_params(), build_network().trainable_params()):
        weight.set_data(like.value())
    return network


def gradients(network, loss_fn, x, y):
    return ms.value_and_grad(lambda: loss_fn(network(x), y), None, network.trainable_params())()
