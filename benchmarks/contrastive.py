"""Time and memory of contrastive training: cached micro batches beside the whole batch. Prints one table.

python benchmarks/contrastive.py                 # 4,096 rows of vectors, 1,024 rows of tokens; some minutes
python benchmarks/contrastive.py --cases vectors # one of them

The whole batch is MindSpore's own step with the formula of CLIP, in GRAPH mode; beside it GradCacheLoss with the same
formula, and with ContrastiveLoss, which takes it in blocks of rows. All train two towers and a temperature.
"""

import argparse
import time
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from windows import in_child, peak_of, versions

from ms_gradaccum import ContrastiveLoss, GradAccumulation, GradCacheLoss, TrainOneStepCell

WHOLE, FORMULA, BLOCKS = "whole batch", "cached, the formula", "cached, ContrastiveLoss"
MICRO_SIZE, LENGTH, TOKENS, WORDS, WINDOWS = 16, 128, 32, 1000, 4
CASES = {"vectors": 4096, "tokens": 1024}


class Formula(nn.Cell):
    """The loss of CLIP as papers have it, with the table of all similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = Parameter(Tensor(np.log(1 / 0.07), ms.float32), name="logit_scale")

    def construct(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = (rows * ops.rsqrt(ops.square(rows).sum(1, keepdims=True)) for rows in (first, second))
        # Not the table, for which MindSpore would need far more memory.
        logits = ops.matmul(first * ops.exp(self.logit_scale), second.T)
        places = ops.arange(logits.shape[0])
        return (ops.cross_entropy(logits, places) + ops.cross_entropy(logits.T, places)) / 2


def tower(inner: int) -> nn.Cell:
    return nn.SequentialCell(nn.Dense(LENGTH, inner), nn.GELU(), nn.Dense(inner, LENGTH))


class TokenTower(nn.Cell):
    """The mean over tokens of the output of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, LENGTH), tower(4 * LENGTH)

    def construct(self, tokens: Tensor) -> Tensor:
        return self.layers(self.words(tokens)).mean(1)


class Towers(nn.Cell):
    """Two towers of a kind."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.first, self.second = (TokenTower() if case == "tokens" else tower(2 * LENGTH) for _ in range(2))

    def construct(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(first), self.second(second)


def make_batch(case: str) -> list[Tensor]:
    random = np.random.default_rng(0)
    if case == "tokens":
        return [Tensor(random.integers(0, WORDS, (CASES[case], TOKENS)), ms.int32) for _ in range(2)]
    return [Tensor(random.normal(size=(CASES[case], LENGTH)).astype(np.float32)) for _ in range(2)]


def build(row: str, case: str) -> Any:
    ms.set_seed(0)
    cell = GradCacheLoss(Towers(case), ContrastiveLoss() if row == BLOCKS else Formula())
    for parameter in cell.trainable_params():
        parameter.init_data()
    optimizer = nn.Momentum(cell.trainable_params(), 0.01, 0.9)
    if row == WHOLE:
        return nn.TrainOneStepCell(cell, optimizer).set_train()
    return TrainOneStepCell(GradAccumulation(cell, MICRO_SIZE), optimizer).set_train()


def run_window(step: Any, batch: list[Tensor]) -> float:
    output = step(*batch)
    loss = output if isinstance(output, Tensor) else output.loss
    return float(loss.asnumpy())


def measure(row: str, case: str, repeat: int) -> dict[str, Any]:
    """Return the losses, the memory that windows take beside what was there, in MB, and their seconds."""
    ms.set_context(mode=ms.GRAPH_MODE)
    batch = make_batch(case)
    step = build(row, case)
    losses, memory = peak_of(lambda: run_window(step, batch), WINDOWS, warm_up=WINDOWS)
    seconds, of_cores = [], []
    for _ in range(repeat):
        start, start_of_cores = time.perf_counter(), time.process_time()
        losses.append(run_window(step, batch))
        seconds.append(time.perf_counter() - start)
        of_cores.append(time.process_time() - start_of_cores)
    return {"losses": losses, "memory": memory, "seconds": seconds, "of_cores": of_cores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeat", type=int, default=6, help="windows that are timed in each process")
    parser.add_argument("--children", type=int, default=2, help="processes of each row, which take turns")
    args = parser.parse_args()
    print(versions())
    for case in args.cases:
        runs: dict[str, list[Any]] = {WHOLE: [], FORMULA: [], BLOCKS: []}
        for _ in range(args.children):
            for row, done in runs.items():
                done.append(in_child(measure, row, case, args.repeat))
        print(f"\n{case}, {CASES[case]} rows, {MICRO_SIZE} micro batches")
        print(f"{'':26}{'seconds':>9}{'of cores':>10}{'ratio':>7}{'MB':>7}{'ratio':>7}")
        whole: tuple[float, ...] = ()
        for row, done in runs.items():
            seconds, cores = (min(min(run[key]) for run in done) for key in ("seconds", "of_cores"))
            memory = float(np.median([run["memory"] for run in done]))
            whole = whole or (cores, memory)
            print(f"{row:26}{seconds:9.2f}{cores:10.2f}{cores / whole[0]:7.2f}{memory:7.0f}{memory / whole[1]:7.2f}")
            if not np.allclose(done[0]["losses"], runs[WHOLE][0]["losses"], rtol=1e-4):
                raise RuntimeError(f"{row} has other losses: {done[0]['losses']} and {runs[WHOLE][0]['losses']}")


if __name__ == "__main__":
    main()
