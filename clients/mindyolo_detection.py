"""mindyolo: tiny YOLOv8 and YOLOv5 networks with its losses, its optimizer, its average and its Trainer."""

import importlib
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import yaml
from comparison import MICRO_SIZE, Candidate, Values, Way, compare, main, package_of, source, values_of
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum.integrations.mindyolo import create_train_step_fn as our_train_step_fn

FOLDER = source("mindyolo")
# The package and its utils import libraries for images, which no step needs.
package_of("mindyolo", FOLDER / "mindyolo")
utils = package_of("mindyolo.utils", FOLDER / "mindyolo" / "utils")
utils.CheckpointManager = importlib.import_module("mindyolo.utils.checkpoint_manager").CheckpointManager
models = importlib.import_module("mindyolo.models")
optim = importlib.import_module("mindyolo.optim")
Config = importlib.import_module("mindyolo.utils.config").Config
factory = importlib.import_module("mindyolo.utils.train_step_factory")
create_trainer = importlib.import_module("mindyolo.utils.trainer_factory").create_trainer

ROWS, UPDATES, SIZE, BOXES, CLASSES = 8, 4, 64, 5, 3
SETTINGS = {"lr_init": 0.01, "momentum": 0.937, "nesterov": True, "optimizer": "momentum", "loss_scale": 1.0}
GROUPS = {"group_param": "yolov8", "gp_weight_decay": 0.0005, "warmup_bias_lr": 0.1, "warmup_epochs": 1}
# Only the first epoch is trained: the updates that are timed go on with later rates.
GROUPS |= {"min_warmup_step": 1, "start_factor": 1.0, "end_factor": 0.01, "epochs": 30, "accumulate": 1}
OWN_LOSS = "each batch divides by its own targets"
OWN_RATES = f"{OWN_LOSS}, and the list of rates has an entry per batch"

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
random = np.random.default_rng(0)
IMAGES = random.random((UPDATES * ROWS, 3, SIZE, SIZE)).astype(np.float32)
LABELS = random.uniform(0.2, 0.8, (UPDATES * ROWS, BOXES, 6)).astype(np.float32)
LABELS[:, :, 1] = random.integers(0, CLASSES, (UPDATES * ROWS, BOXES))
# An image has one to five boxes; the others are padding.
LABELS[np.arange(BOXES) >= random.integers(1, BOXES + 1, (UPDATES * ROWS, 1))] = -1


def numbered(labels: np.ndarray, rows: int) -> np.ndarray:
    """The labels with the number of the image in its batch, as mindyolo's loader has them."""
    labels = labels.copy()
    labels[:, :, 0] = (np.arange(len(labels)) % rows)[:, None]
    return labels


class Case(NamedTuple):
    """A network of mindyolo by the name of its file in configs, and its loss."""

    config: str
    loss: dict[str, Any]

    def settings(self) -> Any:
        network = {}
        for name in (f"{self.config}-base", f"{self.config}n"):
            file = FOLDER / "configs" / self.config / f"{name}.yaml"
            if file.exists():
                network |= yaml.safe_load(file.read_text())["network"]
        return Config(network | {"width_multiple": 0.0625})

    def build(self, create: Any, calls: int = 1, entries: int = 1, **settings: Any) -> Way:
        """`entries` of its list of rates stand for each update."""
        ms.set_seed(1)
        np.random.seed(1)
        config = self.settings()
        network = models.create_model(config.model_name, model_cfg=config, num_classes=CLASSES)
        for _, cell in network.cells_and_names():
            if isinstance(cell, nn.BatchNorm2d):
                # Frozen: statistics of micro batches are not those of the batch.
                cell.use_batch_statistics = False
        loss = models.create_loss(**self.loss, anchors=config.get("anchors", 1), stride=config.stride, nc=CLASSES)
        weights = network.trainable_params()
        rows = ROWS // calls
        groups = GROUPS | {"steps_per_epoch": UPDATES * entries, "total_batch_size": ROWS}
        parameters = optim.create_group_param(params=weights, lr_init=SETTINGS["lr_init"], **groups)
        optimizer = optim.create_optimizer(params=parameters, lr=SETTINGS["lr_init"], **SETTINGS)
        scaler = factory.get_loss_scaler("static", scale_value=1024)
        reducer = factory.get_gradreducer(False, optimizer.parameters)
        positional = ("detect", network, loss, optimizer, 1, scaler, reducer, None, False, True)
        function = create(*positional, **settings)
        network.set_train(True)
        dataset = NumpySlicesDataset({"images": IMAGES, "labels": numbered(LABELS, rows)}, shuffle=False).batch(rows)
        dataset.dataset_size = dataset.get_dataset_size()
        named = {"model_name": "yolo", "train_step_fn": function, "scaler": scaler, "dataloader": dataset}
        named |= {"steps_per_epoch": UPDATES * calls, "network": network, "loss_fn": loss, "ema": None}
        named |= {"optimizer": optimizer, "callback": [], "reducer": reducer, "data_sink": False, "profiler": False}
        trainer = create_trainer(**named)

        def train() -> tuple[Values, Values]:
            before = values_of(weights)
            trainer.train(1, False, accumulate=calls, overflow_still_update=False)
            return before, values_of(weights)

        return Way(train, lambda: Timed(trainer), calls)


class Timed:
    """The step of a Trainer, to be timed. It numbers the images of each batch, as mindyolo's loader does."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.optimizer = trainer.optimizer

    def __call__(self, images: ms.Tensor, labels: ms.Tensor) -> None:
        self.trainer.train_step(images, ms.Tensor(numbered(labels.asnumpy(), len(labels))))


def rows_of(case: Case, repeat: int) -> list[dict[str, Any]]:
    theirs = partial(case.build, factory.create_train_step_fn)
    candidates = [
        Candidate("whole batch, mindyolo", theirs),
        Candidate("ours, micro_size=4", partial(case.build, our_train_step_fn, micro_size=MICRO_SIZE)),
        Candidate("mindyolo, accumulate=4", partial(theirs, MICRO_SIZE, MICRO_SIZE), OWN_RATES),
        Candidate("mindyolo, accumulate=4, a rate per update", partial(theirs, MICRO_SIZE), OWN_LOSS),
    ]
    batch = (IMAGES[:ROWS], LABELS[:ROWS])
    return compare(f"{case.config}, its loss, Momentum in groups", candidates, batch, repeat)


def cases(repeat: int) -> list[dict[str, Any]]:
    v8 = {"name": "YOLOv8Loss", "box": 7.5, "cls": 0.5, "dfl": 1.5, "reg_max": 16}
    v5 = {"name": "YOLOv5Loss", "box": 0.05, "obj": 1.0, "cls": 0.5, "anchor_t": 4.0, "label_smoothing": 0.0}
    v5 |= {"fl_gamma": 0.0, "cls_pw": 1.0, "obj_pw": 1.0}
    return [*rows_of(Case("yolov8", v8), repeat), *rows_of(Case("yolov5", v5), repeat)]


if __name__ == "__main__":
    main(cases)
