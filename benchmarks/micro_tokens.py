"""Micro batches by tokens beside micro batches by rows, for rows as long as those of instruction data.

python benchmarks/micro_tokens.py                    # both modes; some minutes
python benchmarks/micro_tokens.py --modes GRAPH --windows 4

A batch of rows is padded to one length. By rows, each micro batch has as many rows as fit with their padding; by
tokens, as many as fit without it. Both have the same tokens in a micro batch at most, and the same losses.
"""

import argparse
import time
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from windows import in_child, peak_of, versions

from ms_gradaccum import GradAccumulation, TokenMeanLoss, TrainOneStepCell

BY_ROWS, BY_TOKENS = "micro_size", "micro_tokens"
MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}
VOCABULARY, WIDTH, HEADS, LAYERS = 512, 64, 2, 1
# The logarithms of the lengths of the rows have this mean and this deviation: half of the rows have up to 73 tokens.
MEAN, DEVIATION = 4.3, 0.9


class Block(nn.Cell):
    """Causal attention and two layers, for rows of any length up to that of the mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.norms = nn.CellList([nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))])
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.out = nn.Dense(WIDTH, WIDTH)
        self.layers = nn.SequentialCell(nn.Dense(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dense(4 * WIDTH, WIDTH))

    def construct(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).reshape(rows, length, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        scores = ops.matmul(query, key.swapaxes(-1, -2)) * (HEADS / WIDTH) ** 0.5 + self.mask[:length, :length]
        mixed = ops.matmul(ops.softmax(scores, -1), value).swapaxes(1, 2).reshape(rows, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.layers(self.norms[1](x))


class Transformer(nn.Cell):
    """Words to hidden states."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, embedding_table=0.02)
        self.positions = Parameter(Tensor(0.02 * np.random.default_rng(1).normal(size=(longest, WIDTH)), ms.float32))
        mask = Tensor(np.triu(np.full((longest, longest), -1e9, np.float32), k=1))
        self.blocks = nn.SequentialCell([Block(mask) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((WIDTH,))

    def construct(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions[: words.shape[1]]
        return self.norm(self.blocks(x))


def batches(rows: int, longest: int, windows: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the words, labels and lengths of some batches."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(windows):
        lengths = np.clip(np.exp(random.normal(MEAN, DEVIATION, rows)).astype(int), 8, longest)
        words = random.integers(0, VOCABULARY, (rows, longest + 1)).astype(np.int32)
        labels = words[:, 1:].copy()
        labels[np.arange(longest) >= lengths[:, None]] = -100
        found.append((words[:, :-1], labels, lengths))
    return found


def is_label(words: Tensor, labels: Tensor) -> np.ndarray:
    return labels.asnumpy() != -100


def measure(mode: str, row: str, rows: int, longest: int, limit: int, windows: int) -> dict[str, Any]:
    """Return the losses, the tokens with padding, the memory in MB, and the seconds of the first and a later pass."""
    ms.set_context(mode=MODES[mode])
    ms.set_seed(0)
    network = TokenMeanLoss(Transformer(longest), head=nn.Dense(WIDTH, VOCABULARY, has_bias=False))
    if row == BY_ROWS:
        accumulation = GradAccumulation(network, -(-rows * longest // limit))
    else:
        accumulation = GradAccumulation(network, micro_tokens=limit, lengths=is_label)
    step = TrainOneStepCell(accumulation, nn.SGD(network.trainable_params(), 0.01), check_loss=False).set_train()
    data = [(Tensor(words), Tensor(labels)) for words, labels, _ in batches(rows, longest, windows)]
    shapes = []
    for batch in data:
        shapes += [part.tensors[1].shape for part in accumulation.split(*batch).micro_batches]
    seconds = []

    def one_pass() -> list[float]:
        start = time.perf_counter()
        losses = [float(step(*batch)) for batch in data]
        seconds.append(time.perf_counter() - start)
        return losses

    losses, memory = peak_of(one_pass, 3)
    return {
        "losses": losses[-1],
        "tokens": int(sum(map(np.prod, shapes))),
        "micro_batches": len(shapes) / windows,
        "shapes": len(set(shapes)),
        "memory": memory,
        "first": seconds[0] / windows,
        "seconds": min(seconds[1:]) / windows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a padded row")
    parser.add_argument("--limit", type=int, default=1024, help="tokens of a micro batch, at most")
    parser.add_argument("--windows", type=int, default=4, help="batches of a pass")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    used = sum(int(lengths.sum()) for _, _, lengths in batches(args.rows, args.longest, args.windows))
    print(
        f"{args.windows} batches of {args.rows} rows of {args.longest} tokens, {used} of them no padding; at most "
        f"{args.limit} tokens in a micro batch; {versions()}"
    )
    for mode in args.modes:
        print(
            f"\n{mode:14}{'micro batches':>14}{'shapes':>8}{'tokens':>9}{'no padding':>12}{'MB':>7}{'first s':>9}"
            f"{'s':>8}{'ratio':>7}"
        )
        found = {}
        for row in (BY_ROWS, BY_TOKENS):
            each = in_child(measure, mode, row, args.rows, args.longest, args.limit, args.windows)
            found[row] = each
            print(
                f"{row:14}{each['micro_batches']:14.1f}{each['shapes']:8}{each['tokens']:9}"
                f"{used / each['tokens']:12.2f}{each['memory']:7.0f}{each['first']:9.2f}{each['seconds']:8.2f}"
                f"{each['seconds'] / found[BY_ROWS]['seconds']:7.2f}"
            )
        if not np.allclose(found[BY_ROWS]["losses"], found[BY_TOKENS]["losses"], rtol=1e-5):
            raise RuntimeError(f"The losses differ: {found[BY_ROWS]['losses']} and {found[BY_TOKENS]['losses']}")


if __name__ == "__main__":
    main()
