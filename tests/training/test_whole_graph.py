"""TrainOneStepCell inside a larger graph, as in data sink mode: the same windows as when Python calls it."""

import mindspore as ms
import numpy as np
import pytest
from linear_toy import X, momentum, toy_step, weight_of
from mindspore import Tensor
from refusal import refuses
from step_probe import Around, changed, number, tensors, values_of

from ms_gradaccum import ClipByGlobalNorm


def trained_step(micro_size, accumulation_steps):
    settings = {"accumulation_steps": accumulation_steps, "clip": ClipByGlobalNorm(50.0)}
    return toy_step(micro_size, [0.01, 0.02, 0.01, 0.02], momentum, **settings)[1]


def in_graph(step):
    ms.set_context(mode=ms.GRAPH_MODE)
    return Around(step).set_train()


def test_a_graph_goes_on_with_a_window_that_python_has_begun():
    """The count of batches keeps its memory, which a compiled graph reads."""
    step, twin = trained_step(2, 2), trained_step(2, 2)
    batch = tensors(X[:4], 2 * X[:4])

    @ms.jit
    def graph(x, y):
        return step(x, y)

    for call in (graph, graph, step, graph):
        call(*batch)
        twin(*batch)
        assert step.open_batches() == twin.open_batches()
    network = step.network.network.backbone_network
    assert weight_of(network) == pytest.approx(weight_of(twin.network.network.backbone_network))


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_step_inside_a_graph_trains_as_one_that_python_calls(accumulation_steps):
    # Seven rows in three micro batches: 3, 2 and 2.
    step, twin = trained_step(3, accumulation_steps), trained_step(3, accumulation_steps)
    graph = in_graph(step)
    start = weight_of(step.network.network.backbone_network)
    for call in range(3):
        batch = tensors(X[:7] + call, 2 * X[:7])
        report, expected = graph(*batch), twin(*batch)
        for item, expected_item in zip(report, expected):
            np.testing.assert_allclose(item.asnumpy(), expected_item.asnumpy(), rtol=1e-6)
        values, expected_values = values_of(step), values_of(twin)
        for name, value in expected_values.items():
            np.testing.assert_allclose(values[name], value, rtol=1e-6, err_msg=name)
    assert number(report[3]) and weight_of(step.network.network.backbone_network) != start
    if accumulation_steps == 1:
        before = values_of(step)
        report = graph(*tensors(np.full_like(X[:7], np.inf), X[:7]))
        assert number(report[1]) and not number(report[3])
        # The number of windows in a row that made no update.
        assert changed(before, values_of(step)) == {"accu_grads.weight.window_skipped"}


def test_inputs_whose_lengths_are_open_are_refused():
    graph = in_graph(trained_step(2, 1))
    graph.set_inputs(*[Tensor(shape=[None, 1], dtype=ms.float32)] * 2)
    with refuses(ValueError, "call the training"):
        graph(*tensors(X, 2 * X))
