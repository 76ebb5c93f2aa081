"""A process of `test_tokens_of_ranks.py`: windows of two batches, on other numbers of tokens or rows than the other."""

import warnings

from launch import meet, report
from mindspore import Parameter, Tensor, nn
from token_scenarios import LEARNING_RATE, PADDING, ROWS, START, TOKENS, row_batch, token_batch

from ms_gradaccum import Accumulator, GradAccumulation, TrainOneStepCell

rank, _ = meet(eager=True)


class TokenMean(nn.Cell):
    """A mean over tokens, NaN without any, alone or with the number of tokens."""

    def __init__(self, returns_tokens):
        super().__init__()
        self.network = nn.Dense(3, 4, weight_init=Tensor(START), has_bias=False)
        self.loss = nn.CrossEntropyLoss(ignore_index=PADDING)
        self.returns_tokens = returns_tokens

    def construct(self, x, y):
        mean = self.loss(self.network(x).reshape(-1, 4), y.reshape(-1))
        return (mean, (y != -100).sum()) if self.returns_tokens else mean


class Line(nn.Cell):
    """A line without a bias."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([0.0]), "weight")

    def construct(self, x):
        return (x * self.weight - 2 * x).square().mean()


def by_number():
    """A loop that gives the tokens of each batch."""
    cell = TokenMean(returns_tokens=False)
    accumulator = Accumulator(cell, nn.SGD(cell.trainable_params(), LEARNING_RATE), 2)
    for number, lengths in enumerate(TOKENS[rank]):
        x, y = token_batch(rank, number)
        accumulator.backward(Tensor(x), Tensor(y), weight=sum(lengths))
        output = accumulator.step()
    return cell.network.weight.asnumpy().tolist(), float(output.weight)


def by_the_network():
    """A network that returns its mean and its tokens."""
    cell = TokenMean(returns_tokens=True)
    optimizer = nn.SGD(cell.trainable_params(), LEARNING_RATE)
    network = GradAccumulation(cell, 3, weighted="mean")
    step = TrainOneStepCell(network, optimizer, accumulation_steps=2, check_loss=False)
    for number in range(2):
        x, y = token_batch(rank, number)
        output = step(Tensor(x), Tensor(y))
    return cell.network.weight.asnumpy().tolist(), float(output.weight)


def by_gradients(knows_rows):
    """A loop that gives gradients of uneven rows, whose number the loop, a prepared dataset or nobody knows."""
    network = Line()
    accumulator = Accumulator(network, nn.SGD(network.trainable_params(), 0.5), 2)
    batches = [(row_batch(rank, number),) for number in range(len(ROWS[rank]))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in accumulator.prepare(batches) if knows_rows == "dataset" else batches:
            gradient = (2 * x * (x * network.weight.asnumpy() - 2 * x)).mean(keepdims=True)
            accumulator((Tensor(gradient),), weight=len(x) if knows_rows == "loop" else None)
    said = [str(each.message) for each in caught if "need a weight" in str(each.message)]
    return network.weight.asnumpy().tolist(), said


results = {"by number": by_number(), "by the network": by_the_network()}
results |= {"prepared": by_gradients("dataset"), "given": by_gradients("loop"), "unprepared": by_gradients("nobody")}
report(rank, results)
