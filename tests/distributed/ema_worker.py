"""A process of `test_ema_of_ranks.py`: average while it trains in shards, and save in mid-window."""

import os
from pathlib import Path

import mindspore as ms
from launch import meet, report
from scenarios import build_step, fingerprint, train_batches, weights_of
from state_scenarios import FIRST, LAST

from ms_gradaccum import EMA, HSDP, save_state

rank, size = meet(eager=True)

network, step = build_step(accumulation_steps=2, parallel=HSDP(threshold=0))
ema = EMA(0.5, warmup_updates=0)
step.add_callback(ema)
train_batches(step, FIRST, rank, size)
save_state(step, os.environ["STATES"])
train_batches(step, LAST, rank, size)
trained = fingerprint(network)
with ema.swapped():
    averages = weights_of(network)
file = Path(os.environ["REPORT_FOLDER"]) / f"rank_{rank}.ckpt"
ms.save_checkpoint(step, str(file))
shapes = {name: tuple(value.shape) for name, value in ms.load_checkpoint(str(file)).items()}
bits = [fingerprint(ema.parameters), trained == fingerprint(network)]
report(rank, {"averages": averages, "bits": bits, "updates": ema.updates, "shapes": shapes})
