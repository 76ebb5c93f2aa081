"""MindSpore's models repository: a tiny BERT in pretraining, whose loss has two means, in its own training step."""

import importlib
import sys
from typing import Any

import mindspore as ms
import numpy as np
from comparison import MICRO_SIZE, Candidate, Values, Way, compare, main, source, values_of
from mindspore import Tensor, nn

from ms_gradaccum import ClipByGroupNorm, GradAccumulation, GradCacheLoss, TrainOneStepCell

sys.path.insert(0, str(source("models") / "official" / "nlp" / "Bert"))
bert = importlib.import_module("src")

ROWS, UPDATES, LENGTH, WORDS, VOCABULARY = 8, 6, 16, 5, 64
MEAN_OF_MEANS = "each micro batch divides by its own words"
ONE_WEIGHT = "the rows of a micro batch count by its words"

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
random = np.random.default_rng(0)
ALL = UPDATES * ROWS
COUNTS = random.integers(1, WORDS + 1, (ALL, 1))
# In the order of the network: tokens, mask, segments, next sentence, places, words and weights of the masked words.
DATA = (
    random.integers(1, VOCABULARY, (ALL, LENGTH)).astype(np.int32),
    np.ones((ALL, LENGTH), np.int32),
    random.integers(0, 2, (ALL, LENGTH)).astype(np.int32),
    random.integers(0, 2, (ALL, 1)).astype(np.int32),
    random.integers(0, LENGTH, (ALL, WORDS)).astype(np.int32),
    random.integers(1, VOCABULARY, (ALL, WORDS)).astype(np.int32),
    (np.arange(WORDS) < COUNTS).astype(np.float32),
)
FOR_BACKBONE, FOR_LOSS = (0, 1, 2, 4), (3, 5, 6)


def network_for_cpu() -> nn.Cell:
    ms.set_seed(1)
    np.random.seed(1)
    sizes = {"seq_length": LENGTH, "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    # The masks of dropout are not those of the whole batch.
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return bert.BertNetworkWithLoss(bert.BertConfig(**sizes, **layers, **dropout), True)


class Backbone(nn.Cell):
    """BERT with its two heads; the words of a row stay with it."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.bert = network.bert

    def construct(self, tokens: Tensor, mask: Tensor, segments: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        words, sentence = self.bert(tokens, mask, segments, places)
        return words.reshape((tokens.shape[0], -1, words.shape[-1])), sentence


class OfAllRows(nn.Cell):
    """BERT's loss, called with the outputs of all rows."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.loss = network.loss

    def construct(self, words: Tensor, sentence: Tensor, is_next: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.loss(words.reshape((-1, words.shape[-1])), sentence, ids, weights, is_next).sum()


class PerRow(nn.Cell):
    """The loss of each row: its next sentence, and its words times `share`, the rows per word of the whole batch."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.bert = network.bert

    def construct(
        self,
        tokens: Tensor,
        mask: Tensor,
        segments: Tensor,
        is_next: Tensor,
        places: Tensor,
        ids: Tensor,
        weights: Tensor,
        share: Tensor,
    ) -> Tensor:
        words, sentence = self.bert(tokens, mask, segments, places)
        of_words = -words.gather_elements(1, ids.reshape((-1, 1))).reshape(ids.shape)
        of_sentence = -sentence.gather_elements(1, is_next)
        return (of_sentence.reshape((-1,)) + share * (weights * of_words).sum(-1)).mean()


class PerWord(nn.Cell):
    """The sum of both means, with the number of words as its weight."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        words = inputs[-1].sum()
        return self.network(*inputs).sum() * words, words


def share_of(columns: list[np.ndarray]) -> np.ndarray:
    """The rows per word of a batch, in each of its rows. Its loss adds 1e-5 to the number of words."""
    weights = columns[6]
    return np.full(len(weights), len(weights) / (weights.sum() + 1e-5), np.float32)


def whole_batch() -> Way:
    network = network_for_cpu()
    optimizer = optimizer_of(network)
    step = bert.BertTrainOneStepCell(network, optimizer, enable_clip_grad=True)
    return way_of(network, step, list)


def ours(kind: str) -> Way:
    network = network_for_cpu()
    optimizer = optimizer_of(network)
    arranged = list
    weighted = False
    loss_cell = network
    if kind == "GradCacheLoss":
        loss_cell = GradCacheLoss(Backbone(network), OfAllRows(network), labels=3)
        arranged = lambda columns: [columns[i] for i in (*FOR_BACKBONE, *FOR_LOSS)]  # noqa: E731
    if kind == "a column":
        loss_cell = PerRow(network)
        arranged = lambda columns: [*columns, share_of(columns)]  # noqa: E731
    if kind == "(loss * words, words)":
        loss_cell = PerWord(network)
        weighted = True
    clip = ClipByGroupNorm({each.name: 1.0 for each in optimizer.parameters})
    step = TrainOneStepCell(GradAccumulation(loss_cell, MICRO_SIZE, weighted=weighted), optimizer, clip=clip)
    return way_of(network, step, arranged)


def optimizer_of(network: nn.Cell) -> nn.Cell:
    return nn.AdamWeightDecay(network.trainable_params(), 1e-3, weight_decay=0.01)


def way_of(network: nn.Cell, step: nn.Cell, arranged: Any) -> Way:
    step.set_train()
    weights = network.trainable_params()

    def train() -> tuple[Values, Values]:
        before = values_of(weights)
        for begin in range(0, ALL, ROWS):
            columns = [column[begin : begin + ROWS] for column in DATA]
            step(*(Tensor(column) for column in arranged(columns)))
        return before, values_of(weights)

    return Way(train, lambda: Arranged(step, arranged))


class Arranged:
    """A step that gets the columns of the data in the order of its loss cell."""

    def __init__(self, step: nn.Cell, arranged: Any) -> None:
        self.step = step
        self.arranged = arranged
        self.optimizer = step.optimizer

    def __call__(self, *inputs: Tensor) -> None:
        columns = self.arranged([each.asnumpy() for each in inputs])
        self.step(*(Tensor(column) for column in columns))


def cases(repeat: int) -> list[dict[str, Any]]:
    candidates = [
        Candidate("whole batch, BertTrainOneStepCell", whole_batch),
        Candidate("ours, GradCacheLoss", lambda: ours("GradCacheLoss")),
        Candidate("ours, rows per word as a column", lambda: ours("a column")),
        Candidate("ours, (loss * words, words)", lambda: ours("(loss * words, words)"), ONE_WEIGHT),
        Candidate("ours, as it is", lambda: ours(""), MEAN_OF_MEANS),
    ]
    return compare("BERT, masked words and next sentence", candidates, [c[:ROWS] for c in DATA], repeat)


if __name__ == "__main__":
    main(cases)
