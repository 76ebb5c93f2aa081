"""A training that is killed again and again: started with the same command it goes on from its last state.

python fault_worker.py FOLDER          alone, or under msrun
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, train
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset

from ms_gradaccum import GradAccumulation, Model, StateCheckpoint

EPOCHS, ROWS, BATCH = int(os.getenv("FAULT_EPOCHS", "6")), 48, 4
folder = Path(sys.argv[1])
ms.set_context(mode=ms.PYNATIVE_MODE)
os.environ["MS_JIT"] = "0"  # what is compiled would take most of the time
ms.runtime.launch_blocking()  # and what threads hand on to one another the rest
ms.set_seed(1)
rank, size = 0, 1
if os.getenv("MS_ROLE"):
    init()
    rank, size = get_rank(), get_group_size()
numbers = np.random.default_rng(0)
x = numbers.normal(size=(ROWS, 3)).astype(np.float32)
y = numbers.normal(size=(ROWS, 1)).astype(np.float32)
data = NumpySlicesDataset((x, y), shuffle=True, num_shards=size, shard_id=rank).batch(BATCH)
network = nn.Dense(3, 1)
optimizer = nn.Momentum(network.trainable_params(), nn.cosine_decay_lr(0.0, 0.05, 999, 999, 1), 0.9)


class Diary(train.Callback):
    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        rows = hashlib.sha256(params.train_dataset_element[0].asnumpy().tobytes()).hexdigest()[:16]
        line = [params.cur_step_num, rows, float(params.net_outputs.loss.asnumpy())]
        with (folder / f"diary_{rank}.jsonl").open("a") as diary:
            diary.write(json.dumps(line) + "\n")


loss_cell = GradAccumulation(nn.WithLossCell(network, nn.MSELoss()), 2)
model = Model(loss_cell, optimizer=optimizer, accumulation_steps=2, last_window="carry", check_loss=False)
checkpoint = StateCheckpoint(folder / "states", save_checkpoint_steps=1, keep_checkpoint_max=2)
model.train(EPOCHS, data, callbacks=[checkpoint, Diary()], resume=True)
buffer = model.train_network.body.reducer.buffer
held = [*network.trainable_params(), *optimizer.get_parameters(), *buffer.get_parameters()]
digest = hashlib.sha256(b"".join(parameter.asnumpy().tobytes() for parameter in held)).hexdigest()
(folder / f"end_{rank}.txt").write_text(digest)
