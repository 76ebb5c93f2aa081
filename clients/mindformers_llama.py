"""mindformers: its legacy Llama in its Trainer, with its AdamW, parameter groups, schedule and monitors."""

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
from comparison import MICRO_SIZE, Candidate, Values, Way, compare, main, values_of
from mindformers import MindFormerConfig, Trainer
from mindformers.core.context import build_context
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Tensor
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback

import ms_gradaccum.integrations.mindformers

CONFIG = Path(__file__).with_name("llama.yaml")
ROWS, UPDATES = 8, 3
FALLS_BACK = "set back to 1 outside semi-auto-parallel"
MEAN_OF_MEANS = "a micro batch counts by its rows, padded or not"

random = np.random.default_rng(0)
TOKENS = random.integers(1, 64, (UPDATES * ROWS, 17)).astype(np.int32)
LENGTHS = random.integers(3, 18, (UPDATES * ROWS, 1))
PADDED_LABELS = np.where(np.arange(17) < LENGTHS, TOKENS, -100).astype(np.int32)


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class StepWithoutOverflowCheck(MFTrainOneStepCell):
    """mindformers' own step without the operator that looks for an overflow, which CPU lacks."""

    def get_overflow_status(self, status: Any, compute_output: Any) -> Tensor:
        return Tensor(False)


class Keeper(Callback):
    """Keeps the step, the weights from before the training, and what each step returned."""

    def __init__(self) -> None:
        super().__init__()
        self.step: Any = None
        self.before: Values = ()
        self.reports: list[list[float]] = []

    def on_train_begin(self, run_context: Any) -> None:
        self.step = run_context.original_args().train_network
        self.before = values_of(self.step.optimizer.parameters)

    def on_train_step_end(self, run_context: Any) -> None:
        outputs = run_context.original_args().net_outputs
        self.reports.append([float(item.asnumpy().item()) for item in outputs])


def build(wrapper: dict[str, Any], labels: np.ndarray, per_token: bool, calls: int = 1, **runner: Any) -> Way:
    config = MindFormerConfig(str(CONFIG))
    config.calculate_per_token_loss = per_token
    config.runner_wrapper = MindFormerConfig(**{"use_clip_grad": True, "max_grad_norm": 0.5, **copy.deepcopy(wrapper)})
    config.runner_config.merge_from_dict({"batch_size": ROWS // calls, **runner})
    build_context(config)
    dataset = NumpySlicesDataset((TOKENS, labels), ["input_ids", "labels"], shuffle=False).batch(ROWS // calls)
    keeper = Keeper()

    def train() -> tuple[Values, Values]:
        Trainer(args=config, train_dataset=dataset, callbacks=[keeper]).train()
        return keeper.before, values_of(keeper.step.optimizer.parameters)

    return Way(train, lambda: keeper.step, calls, keeper.reports)


def cases(repeat: int) -> list[dict[str, Any]]:
    theirs = {"type": "StepWithoutOverflowCheck"}
    ours = {"type": "AccumulatedStep", "micro_size": MICRO_SIZE}
    # As a file that nothing imports, which mindformers finds by itself.
    found = ours | {"auto_register": "mindformers.AccumulatedStep"}
    os.environ["REGISTER_PATH"] = str(Path(ms_gradaccum.integrations.mindformers.__file__).parent)
    whole, micro = "whole batch, mindformers", "ours, micro_size: 4"
    own = "mindformers, gradient_accumulation_steps: 4"
    full, padded = (TOKENS[:ROWS], TOKENS[:ROWS]), (TOKENS[:ROWS], PADDED_LABELS[:ROWS])
    scale = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 2}
    rows = compare(
        "Llama, AdamW in groups, CosineWithWarmUpLR",
        [
            Candidate(whole, lambda: build(theirs, TOKENS, False)),
            Candidate(micro, lambda: build(ours, TOKENS, False)),
            Candidate(
                own,
                lambda: build(theirs, TOKENS, False, MICRO_SIZE, gradient_accumulation_steps=MICRO_SIZE),
                FALLS_BACK,
            ),
        ],
        full,
        repeat,
    )
    rows += compare(
        "the same, padded, mean over tokens, dynamic loss scale",
        [
            Candidate(whole, lambda: build(theirs | {"scale_sense": scale}, PADDED_LABELS, True)),
            Candidate(micro, lambda: build(found | {"scale_sense": scale}, PADDED_LABELS, True)),
            Candidate(f"{micro}, mean over rows", lambda: build(ours, PADDED_LABELS, False), MEAN_OF_MEANS),
        ],
        padded,
        repeat,
    )
    return rows


if __name__ == "__main__":
    main(cases)
