"""mindcv: convnextv2_atto and mobilenet_v2_035 through create_trainer, with its AdamW and Lion."""

from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from comparison import MICRO_SIZE, Candidate, Values, Way, compare, main, values_of
from mindcv.loss import create_loss
from mindcv.models import create_model
from mindcv.optim import create_optimizer
from mindcv.scheduler import create_scheduler
from mindcv.utils.trainer_factory import create_trainer as their_trainer
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum.integrations.mindcv import create_trainer as our_trainer

ROWS, UPDATES, EPOCHS, SIZE = 8, 3, 2, 64
RATE = {"adamw": 5e-4, "lion": 1e-4}
STEPS = f"gradient_accumulation_steps={MICRO_SIZE}"
BY_STEPS = {"calls": MICRO_SIZE, "gradient_accumulation_steps": MICRO_SIZE}
TIMED = 100
OWN_RATES = "its AdamW and Lion move the rate once per batch"
OWN_CLIP = "clips each micro batch"

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
random = np.random.default_rng(0)
IMAGES = random.normal(size=(UPDATES * ROWS, 3, SIZE, SIZE)).astype(np.float32)
LABELS = random.integers(0, 10, UPDATES * ROWS).astype(np.int32)


def network_of(name: str) -> nn.Cell:
    ms.set_seed(1)
    np.random.seed(1)
    network = create_model(name, num_classes=10)
    for _, cell in network.cells_and_names():
        if isinstance(cell, nn.BatchNorm2d):
            # Frozen: statistics of micro batches are not those of the batch.
            cell.use_batch_statistics = False
        if isinstance(cell, nn.Dropout):
            # Its masks are not those of the batch either.
            cell.p = 0.0
    return network


def rates_of(name: str, entries: int) -> Any:
    """The schedule as the list that mindcv makes of it, with so many entries for each update; or one number for 0."""
    if entries == 0:
        return RATE[name]
    main, least = RATE[name], RATE[name] / 10
    settings = {"warmup_epochs": 0, "decay_epochs": EPOCHS, "num_epochs": EPOCHS}
    rates = create_scheduler(UPDATES, "cosine_decay", main, least, **settings)
    # The updates that are timed go on with the last rate.
    return [rate for rate in [*rates, *[least] * TIMED] for _ in range(entries)]


class Case(NamedTuple):
    """A network, an optimizer, how many entries a list of rates has for each update, and further settings."""

    network: str
    optimizer: str
    entries: int
    settings: dict[str, Any]

    def build(self, trainer: Any, calls: int = 1, entries: int | None = None, **settings: Any) -> Way:
        network = network_of(self.network)
        weights = network.trainable_params()
        rates = rates_of(self.optimizer, self.entries if entries is None else entries)
        decay = {"weight_decay": 0.05, "weight_decay_filter": "norm_and_bias"}
        optimizer = create_optimizer(network, self.optimizer, lr=rates, **decay)
        loss = create_loss("CE", label_smoothing=0.1)
        positional = (network, loss, optimizer, {"accuracy": nn.Accuracy()}, "O0", None, "fixed", 1.0)
        model = trainer(*positional, **self.settings, **settings)
        dataset = NumpySlicesDataset((IMAGES, LABELS), shuffle=False).batch(ROWS // calls)

        def train() -> tuple[Values, Values]:
            before = values_of(weights)
            model.train(EPOCHS, dataset, dataset_sink_mode=False)
            return before, values_of(weights)

        return Way(train, lambda: model.train_network, calls)

    def whole(self) -> Candidate:
        return Candidate("whole batch, mindcv", lambda: self.build(their_trainer))

    def micro(self) -> Candidate:
        return Candidate("ours, micro_size=4", lambda: self.build(our_trainer, micro_size=MICRO_SIZE))

    def steps(self) -> Candidate:
        return Candidate(f"ours, {STEPS}", lambda: self.build(our_trainer, **BY_STEPS))

    def theirs(self, name: str = f"mindcv, {STEPS}", wrong: str = "", entries: int | None = None) -> Candidate:
        return Candidate(name, lambda: self.build(their_trainer, entries=entries, **BY_STEPS), wrong)


def cases(repeat: int) -> list[dict[str, Any]]:
    batch = (IMAGES[:ROWS], LABELS[:ROWS])
    case = Case("convnextv2_atto", "adamw", 1, {})
    repeated = case.theirs("mindcv, the same, each rate four times", entries=MICRO_SIZE)
    rows = compare(
        "convnextv2_atto, AdamW, rates as a list",
        [case.whole(), case.micro(), case.steps(), case.theirs(wrong=OWN_RATES), repeated],
        batch,
        repeat,
    )
    case = Case("mobilenet_v2_035_96", "lion", 1, {})
    repeated = case.theirs(f"mindcv, {STEPS}, each rate four times", entries=MICRO_SIZE)
    candidates = [case.whole(), case.micro(), repeated]
    rows += compare("mobilenet_v2_035_96, Lion, rates as a list", candidates, batch, repeat)
    case = Case("mobilenet_v2_035_96", "adamw", 0, {"clip_grad": True, "clip_value": 0.05})
    candidates = [case.whole(), case.steps(), case.theirs(wrong=OWN_CLIP)]
    return rows + compare("mobilenet_v2_035_96, AdamW, one rate, clip", candidates, batch, repeat)


if __name__ == "__main__":
    main(cases)
