"""mindocr: tiny networks with its losses, in its training step, with its callback that evaluates and saves."""

import importlib
import tempfile
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from comparison import MICRO_SIZE, Candidate, Values, Way, compare, main, package_of, source, values_of
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum import GradCacheLoss
from ms_gradaccum import Model as OurModel
from ms_gradaccum.integrations.mindone import train_step

FOLDER = source("mindocr") / "mindocr"
# These packages import libraries for images and text, which no step needs.
for part in ("", ".utils", ".losses"):
    package_of(f"mindocr{part}", FOLDER / part[1:])
losses = importlib.import_module("mindocr.losses.rec_loss")
det_loss = importlib.import_module("mindocr.losses.det_loss")
EvalSaveCallback = importlib.import_module("mindocr.utils.callbacks").EvalSaveCallback
NetWithLossWrapper = importlib.import_module("mindocr.utils.model_wrapper").NetWithLossWrapper
TrainOneStepWrapper = importlib.import_module("mindocr.utils.train_step_wrapper").TrainOneStepWrapper

ROWS, UPDATES, LENGTH, WIDTH, CLASSES = 8, 6, 5, 12, 7
RATES = [1e-2 * (1 - update / UPDATES) for update in range(UPDATES)]
MEAN_OF_MEANS = "a ratio of sums: each micro batch has its own"
OWN_RATES = "the list has an entry per batch, and the optimizer reads one per update"

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
random = np.random.default_rng(0)
LINES = random.random((UPDATES * ROWS, 3, 8, WIDTH)).astype(np.float32)
TEXTS = random.integers(0, CLASSES - 1, (UPDATES * ROWS, LENGTH)).astype(np.int32)
MAPS = (random.random((UPDATES * ROWS, 1, 8, WIDTH)) < random.random((UPDATES * ROWS, 1, 1, 1))).astype(np.float32)
MASKS = np.ones((UPDATES * ROWS, 8, WIDTH), np.float32)
THRESHOLDS = random.random((UPDATES * ROWS, 8, WIDTH)).astype(np.float32)


class Recognizer(nn.Cell):
    """Logits of each column of a line of text, of shape (columns, rows, classes) as CRNN returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, pad_mode="pad", padding=1, has_bias=True)
        self.dense = nn.Dense(64, CLASSES)

    def construct(self, images: ms.Tensor) -> ms.Tensor:
        features = ops.relu(self.conv(images))
        features = features.transpose((3, 0, 1, 2))
        return self.dense(features.reshape((WIDTH, -1, 64)))


class Detector(nn.Cell):
    """The three maps of DBNet: text, threshold, and a step between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, pad_mode="pad", padding=1, has_bias=True)
        self.head = nn.Conv2d(8, 2, 1, has_bias=True)

    def construct(self, images: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor, ms.Tensor]:
        maps = ops.sigmoid(self.head(ops.relu(self.conv(images))))
        text, threshold = maps[:, :1], maps[:, 1:]
        return text, threshold, ops.sigmoid(50.0 * (text - threshold))


class OfMaps(nn.Cell):
    """mindocr's loss, called with the maps of all rows."""

    def __init__(self, loss_fn: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.loss_fn = loss_fn

    def construct(self, text: ms.Tensor, threshold: ms.Tensor, step: ms.Tensor, *labels: ms.Tensor) -> ms.Tensor:
        return self.loss_fn((text, threshold, step), *labels)


def detection(network: nn.Cell) -> nn.Cell:
    return NetWithLossWrapper(network, det_loss.DBLoss())


def detection_of_all_rows(network: nn.Cell) -> nn.Cell:
    return GradCacheLoss(network, OfMaps(det_loss.DBLoss()), labels=4)


def recognition(rows: int) -> Any:
    return lambda network: NetWithLossWrapper(network, losses.CTCLoss(WIDTH, LENGTH, rows))


class Build:
    """A network by its class, its data, its rates, and the step and the Model that train it."""

    def __init__(self, network: Any, columns: Any, rates: Any) -> None:
        self.network = network
        self.columns = columns
        self.rates = rates

    def __call__(self, loss_cell: Any, step: Any, model: Any, calls: int = 1, entries: int = 1, **settings: Any) -> Way:
        """`entries` of a list of rates stand for each update."""
        ms.set_seed(1)
        np.random.seed(1)
        network = self.network()
        weights = network.trainable_params()
        rates = self.rates
        if isinstance(rates, list):
            # The updates that are timed go on with the last rate.
            rates = [rate for rate in [*rates, *rates[-1:] * 100] for _ in range(entries)]
        optimizer = nn.AdamWeightDecay(weights, rates, weight_decay=0.05)
        scale = nn.FixedLossScaleUpdateCell(1024.0)
        train_net = step(loss_cell(network), optimizer, scale, clip_grad=True, clip_norm=0.5, **settings)
        dataset = NumpySlicesDataset(self.columns, shuffle=False).batch(ROWS // calls)

        def train() -> tuple[Values, Values]:
            before = values_of(weights)
            with tempfile.TemporaryDirectory() as folder:
                callback = EvalSaveCallback(network, ckpt_save_dir=folder)
                model(train_net).train(1, dataset, callbacks=[callback], dataset_sink_mode=False)
            return before, values_of(weights)

        return Way(train, lambda: train_net, calls)


THEIRS = {"step": TrainOneStepWrapper, "model": ms.Model}
OURS = {"step": train_step, "model": OurModel}
BY_STEPS = {"calls": MICRO_SIZE, "gradient_accumulation_steps": MICRO_SIZE}


def texts(name: str, rates: Any, repeat: int) -> list[dict[str, Any]]:
    build = Build(Recognizer, (LINES, TEXTS), rates)
    of_part = partial(build, recognition(ROWS // MICRO_SIZE))
    candidates = [
        Candidate("whole batch, mindocr", partial(build, recognition(ROWS), **THEIRS)),
        Candidate("ours, micro_size=4", partial(of_part, **OURS, micro_size=MICRO_SIZE)),
        Candidate("ours, gradient_accumulation_steps=4", partial(of_part, **OURS, **BY_STEPS)),
        Candidate("mindocr, gradient_accumulation_steps=4", partial(of_part, **THEIRS, **BY_STEPS)),
    ]
    if isinstance(rates, list):
        per_batch = partial(of_part, **THEIRS, **BY_STEPS, entries=MICRO_SIZE)
        candidates.append(Candidate("mindocr, the same, a rate per batch", per_batch, OWN_RATES))
    return compare(f"CTCLoss, {name}, clip, loss scale", candidates, (LINES[:ROWS], TEXTS[:ROWS]), repeat)


def maps(repeat: int) -> list[dict[str, Any]]:
    columns = (LINES, MAPS, MASKS, THRESHOLDS, MASKS)
    build = Build(Detector, columns, 1e-2)
    of_part = partial(build, detection)
    candidates = [
        Candidate("whole batch, mindocr", partial(build, detection, **THEIRS)),
        Candidate(
            "ours, GradCacheLoss, micro_size=4", partial(build, detection_of_all_rows, **OURS, micro_size=MICRO_SIZE)
        ),
        Candidate("ours, micro_size=4", partial(of_part, **OURS, micro_size=MICRO_SIZE), MEAN_OF_MEANS),
        Candidate("mindocr, gradient_accumulation_steps=4", partial(of_part, **THEIRS, **BY_STEPS), MEAN_OF_MEANS),
    ]
    return compare("DBLoss, one rate, clip, loss scale", candidates, [c[:ROWS] for c in columns], repeat)


def cases(repeat: int) -> list[dict[str, Any]]:
    return [*texts("one rate", 1e-2, repeat), *texts("rates as a list", RATES, repeat), *maps(repeat)]


if __name__ == "__main__":
    main(cases)
