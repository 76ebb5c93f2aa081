"""Windows whose graphs MindSpore fuses give what MindSpore's own parts give op by op. Runs in a process of its own."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import JitConfig, Tensor
from step_probe import Around

from ms_gradaccum import StepOutput

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from scenarios import BY_HAND, CLIPS, batch, build_step, joined, stock_clipped, weights_of

# Its Tanh is rounded otherwise.
FUSION = JitConfig(jit_level="O1", graph_kernel_flags="--opt_level=2 --disable_expand_ops=AssignAdd")
BATCHES = [batch(number) for number in range(4)]


def check(network, output, windows):
    expected, reports = stock_clipped("Momentum", windows, BY_HAND["norm"])
    _, norm, clipped_norm = reports[-1]
    assert clipped_norm < norm
    np.testing.assert_allclose(output.grad_norm.asnumpy(), norm, rtol=3e-4)
    np.testing.assert_allclose(weights_of(network), expected, rtol=0, atol=5e-5)


def check_windows(mode):
    """Four windows, between them one of NaN."""
    ms.set_context(mode=mode)
    network, step = build_step("Momentum", 5, clip=CLIPS["norm"]())
    step.set_jit_config(FUSION)
    for number, (x, y) in enumerate(BATCHES):
        if number == 1:
            assert not step(Tensor(x * np.nan), Tensor(y)).updated
        output = step(Tensor(x), Tensor(y))
    check(network, output, BATCHES)


def check_window_in_graph():
    """A window of two batches in a larger graph, which decides by a count whether it updates."""
    ms.set_context(mode=ms.GRAPH_MODE)
    network, step = build_step("Momentum", 5, clip=CLIPS["norm"](), accumulation_steps=2)
    graph = Around(step).set_train()
    graph.set_jit_config(FUSION)
    first, second = (StepOutput(*graph(*map(Tensor, arrays))) for arrays in BATCHES[:2])
    assert not first.updated and second.updated
    check(network, second, [joined(*BATCHES[:2])])


if __name__ == "__main__":
    check_windows(ms.GRAPH_MODE)
    check_windows(ms.PYNATIVE_MODE)
    check_window_in_graph()
