"""mindone: a tiny BERT of its transformers, with its optimizer, in the training step of its trainers."""

from typing import Any

import mindspore as ms
import numpy as np
from comparison import MICRO_SIZE, Candidate, Values, Way, compare, main, values_of
from mindone.trainers.optim import create_optimizer
from mindone.trainers.train_step import TrainOneStepWrapper
from mindone.transformers import BertForSequenceClassification
from mindspore import Tensor, nn, ops
from transformers import BertConfig

from ms_gradaccum.integrations.mindone import ModelLoss, train_step

ROWS, UPDATES, LENGTH = 8, 6, 16
COLUMNS = ("input_ids", "attention_mask", "labels")
RATE = 1e-3
# The updates that are timed go on with the last rate.
RATES = [RATE * (1 - update / UPDATES) for update in range(UPDATES)] + [RATE / UPDATES] * 100
OWN_RATES = "its AdamW moves the rate once per batch"

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
random = np.random.default_rng(0)
MASK = np.arange(LENGTH) < random.integers(4, LENGTH + 1, (UPDATES * ROWS, 1))
DATA = (
    random.integers(1, 64, (UPDATES * ROWS, LENGTH)).astype(np.int32),
    MASK.astype(np.int32),
    random.integers(0, 3, UPDATES * ROWS).astype(np.int32),
)


class LayerNorm(nn.Cell):
    """Stands for one of mint, whose operator CPU lacks."""

    def __init__(self, cell: Any) -> None:
        super().__init__(auto_prefix=False)
        self.weight, self.bias = cell.weight, cell.bias
        self.norm = ops.LayerNorm(-1, -1, cell.eps)

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.bias)[0]


class Embedding(nn.Cell):
    """The same."""

    def __init__(self, cell: Any) -> None:
        super().__init__(auto_prefix=False)
        self.weight = cell.weight

    def construct(self, x: Tensor) -> Tensor:
        return ops.gather(self.weight, x, 0)


def model_for_cpu() -> nn.Cell:
    ms.set_seed(1)
    np.random.seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "relu", "num_labels": 3}
    # The masks of dropout are not those of the whole batch.
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**sizes, **layers, **dropout))
    for _, parent in model.cells_and_names():
        for name, cell in parent.name_cells().items():
            for kind in (LayerNorm, Embedding):
                if type(cell).__name__.startswith(kind.__name__):
                    parent._cells[name] = kind(cell)
    return model


def build(build_step: Any, rates: Any, calls: int = 1, **settings: Any) -> Way:
    model = model_for_cpu()
    optimizer = create_optimizer(model.trainable_params(), "adamw_re", lr=rates, weight_decay=0.01)
    step = build_step(ModelLoss(model, COLUMNS), optimizer, clip_grad=True, clip_norm=0.5, **settings)
    step.set_train()

    def train() -> tuple[Values, Values]:
        before = values_of(optimizer.parameters)
        for begin in range(0, UPDATES * ROWS, ROWS // calls):
            step(*(Tensor(column[begin : begin + ROWS // calls]) for column in DATA))
        return before, values_of(optimizer.parameters)

    return Way(train, lambda: step, calls)


def candidates(rates: Any) -> list[Candidate]:
    theirs = {"build_step": TrainOneStepWrapper, "rates": rates, "scale_sense": Tensor(1024.0, ms.float32)}
    ours = {"build_step": train_step, "rates": rates, "scale_sense": 1024.0}
    by_steps = {"calls": MICRO_SIZE, "gradient_accumulation_steps": MICRO_SIZE}
    wrong = OWN_RATES if isinstance(rates, list) else ""
    return [
        Candidate("whole batch, mindone", lambda: build(**theirs)),
        Candidate("ours, micro_size=4", lambda: build(**ours, micro_size=MICRO_SIZE)),
        Candidate("ours, gradient_accumulation_steps=4", lambda: build(**ours, **by_steps)),
        Candidate("mindone, gradient_accumulation_steps=4", lambda: build(**theirs, **by_steps), wrong),
    ]


def cases(repeat: int) -> list[dict[str, Any]]:
    batch = [column[:ROWS] for column in DATA]
    rows = compare("BERT, AdamW, clip, constant rate", candidates(RATE), batch, repeat)
    return rows + compare("BERT, AdamW, clip, schedule as a list", candidates(RATES), batch, repeat)


if __name__ == "__main__":
    main(cases)
