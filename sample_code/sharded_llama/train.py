"""A network of Llama's shape for 8 devices, dp 2 x mp 4, rehearsed on a machine that has none of them."""

from llama import LazyLlamaLoss, Llama, tokens_of
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_gradaccum import ClipByGlobalNorm, GradAccumulation, TrainOneStepCell, simulate

SHAPE = Llama(dp=2, mp=4, layers=2, sequence_parallel=True)


def build():
    """Return the training step, and a batch of 16 rows for all devices."""
    loss = LazyLlamaLoss(SHAPE)
    # The loss is a sum over tokens, beside their number.
    cell = AutoParallel(GradAccumulation(loss, 2, weighted=True))
    cell.dataset_strategy(((SHAPE.dp, 1), (SHAPE.dp, 1)))
    cell.hsdp(threshold=0, optimizer_level="level1")
    optimizer = nn.AdamWeightDecay(loss.trainable_params(), 1e-3)
    step = TrainOneStepCell(cell, optimizer, clip=ClipByGlobalNorm(1.0))
    tokens, labels = tokens_of(SHAPE, 16, 0)
    return step, (Tensor(tokens), Tensor(labels))


if __name__ == "__main__":
    found = simulate(f"{__file__}:build", devices=8, run=True)
    print(found)
    assert found.training is not None
    assert found.training.difference < 1e-5 < 1e-3 < found.training.moved, (
        "the devices train otherwise than one process"
    )
