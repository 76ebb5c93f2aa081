"""Time and memory of the loss of a language model over the size of its vocabulary. Prints one table.

python benchmarks/language_model.py                          # 1 k to 128 k words; some minutes, up to 9 GB
python benchmarks/language_model.py --classes 1024 16384     # some of them
python benchmarks/language_model.py --record docs/benchmarks/language_model.json
python benchmarks/language_model.py --resident               # all memory of a transformer; up to 10 GB

MindSpore's own step computes all logits and nn.CrossEntropyLoss; beside it a window of one micro batch with
TokenMeanLoss, which takes the same logits, and with TokenMeanLoss and the head. All have the same loss. The memory of a
whole training is set beside that of a loss which reads one word of the head for each token and has no table.
"""

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from windows import TokenLoss, in_child, peak_of, status, versions

from ms_gradaccum import TokenMeanLoss, TrainOneStepCell

sys.path.append(str(Path(__file__).resolve().parents[1] / "sample_code" / "transformer_lm"))
from transformer import Block  # noqa: E402

STOCK, LOGITS, HEAD = "MindSpore's own step", "TokenMeanLoss", "TokenMeanLoss, head"
STOCK_WITHOUT, WITHOUT = "MindSpore's own step, no table", "a window, no table"
STOCK_ROWS = (STOCK, STOCK_WITHOUT)
MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}
TOKENS, WIDTH = (16, 64), 128


class Network(nn.Cell):
    """An embedding, a layer or several of a transformer and, if asked, the head."""

    def __init__(self, classes: int, with_head: bool, width: int = WIDTH, layers: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.layer = nn.Dense(width, width)
        if layers:
            self.layer = nn.SequentialCell([Block(width, 8, TOKENS[1]) for _ in range(layers)])
        self.head = nn.Dense(width, classes, has_bias=False)
        self.with_head = with_head

    def construct(self, tokens: Tensor) -> Tensor:
        hidden = ops.tanh(self.layer(self.embedding(tokens)))
        return self.head(hidden) if self.with_head else hidden


class NoTable(nn.Cell):
    """A mean over tokens that reads the row of the label in the head, and no other logit."""

    def __init__(self, network: Network) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weight = network.head.weight

    def construct(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return (self.network(tokens) * ops.gather(self.weight, labels, 0)).sum(-1).mean()


def build(row: str, classes: int) -> Any:
    ms.set_seed(0)
    network = Network(classes, row != HEAD)
    random = np.random.default_rng(0)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(random.normal(0, 0.1, parameter.shape).astype(np.float32)))
    return step_of(row, network, nn.SGD(network.trainable_params(), 0.1))


def step_of(row: str, network: Network, optimizer: nn.Cell) -> Any:
    """Return the step of a row, in training mode."""
    loss_cell: nn.Cell
    if row == STOCK:
        loss_cell = TokenLoss(network)
    elif row in (LOGITS, HEAD):
        loss_cell = TokenMeanLoss(network, head=network.head if row == HEAD else None)
    else:
        loss_cell = NoTable(network)
    if row in STOCK_ROWS:
        return nn.TrainOneStepCell(loss_cell, optimizer).set_train()
    return TrainOneStepCell(loss_cell, optimizer, check_loss=False).set_train()


def run_window(step: Any, batch: list[Tensor]) -> float:
    output = step(*batch)
    loss = output if isinstance(output, Tensor) else output.loss
    return float(loss.asnumpy())


def measure(mode: str, row: str, classes: int, repeat: int) -> dict[str, Any]:
    """Return the losses, the memory that windows take beside what was there, in MB, and the seconds of a window."""
    ms.set_context(mode=MODES[mode])
    random = np.random.default_rng(1)
    batch = [Tensor(random.integers(0, classes, TOKENS), ms.int32) for _ in range(2)]
    step = build(row, classes)
    losses, memory = peak_of(lambda: run_window(step, batch), 2)
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        losses.append(run_window(step, batch))
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "memory": memory, "seconds": min(seconds)}


def resident(mode: str, row: str, classes: int) -> tuple[float, float]:
    """Return the memory in MB that two windows of a transformer need at least, and what they take.

    That is parameters, Adam's moments and, in a window, the sums. What the process has after two windows of a small
    vocabulary is not counted.
    """
    ms.set_context(mode=MODES[mode])
    for words in (64, classes):
        before = status("VmRSS")
        network = Network(words, row in (STOCK, LOGITS), width=512, layers=6)
        step = step_of(row, network, nn.Adam(network.trainable_params(), 1e-4))
        batch = [Tensor(np.random.default_rng(1).integers(0, words, TOKENS), ms.int32)] * 2
        for _ in range(2):
            run_window(step, batch)
    parameters = sum(parameter.nbytes for parameter in network.get_parameters()) / 2**20
    return parameters * (3 if row in STOCK_ROWS else 4), status("VmHWM") - before


def print_resident(modes: list[str]) -> None:
    for mode in modes:
        print(f"\n{mode:32}{'needed':>8}{'MB':>8}{'ratio':>7}")
        for row in (STOCK, STOCK_WITHOUT, WITHOUT, LOGITS, HEAD):
            needed, taken = in_child(resident, mode, row, 100_000)
            print(f"{row:32}{needed:8.0f}{taken:8.0f}{taken / needed:7.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", type=int, default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeat", type=int, default=5, help="windows that are timed")
    parser.add_argument("--resident", action="store_true", help="all memory of a transformer of 100,000 words")
    parser.add_argument("--record", type=Path, help="a file for the figures, which draw.py draws")
    args = parser.parse_args()
    if args.resident:
        print(f"{TOKENS[0] * TOKENS[1]} tokens, 6 layers, width 512, Adam; {versions()}")
        print_resident(args.modes)
        return
    print(f"{TOKENS[0] * TOKENS[1]} tokens, width {WIDTH}, SGD; {versions()}")
    rows = []
    for mode in args.modes:
        print(f"\n{mode:24}{'words':>8}{'table':>8}{'MB':>8}{'ratio':>7}{'seconds':>9}{'ratio':>7}")
        for classes in args.classes:
            found = {row: in_child(measure, mode, row, classes, args.repeat) for row in (STOCK, LOGITS, HEAD)}
            stock = found[STOCK]
            table = TOKENS[0] * TOKENS[1] * classes * 4 / 2**20
            for row, each in found.items():
                ratios = each["memory"] / stock["memory"], each["seconds"] / stock["seconds"]
                print(
                    f"{row:24}{classes:8}{table:8.0f}{each['memory']:8.0f}{ratios[0]:7.2f}"
                    f"{each['seconds']:9.3f}{ratios[1]:7.2f}"
                )
                if not np.allclose(each["losses"], stock["losses"], rtol=1e-5):
                    raise RuntimeError(f"{row} has other losses: {each['losses']} and {stock['losses']}")
                figures = {"mb": round(each["memory"]), "seconds": round(each["seconds"], 4)}
                rows.append({"mode": mode, "row": row, "classes": classes, "table_mb": round(table), **figures})
    if args.record is not None:
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        head = {"command": "python benchmarks/language_model.py", "versions": versions(), "date": str(date.today())}
        fields = "".join(f' "{name}": {json.dumps(value)},\n' for name, value in head.items())
        args.record.write_text(f'{{\n{fields} "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
