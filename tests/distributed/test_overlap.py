"""Messages that go out op by op while the backward pass of a window's last micro batch goes on."""

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from quick_mindspore import eagerly

sys.path.insert(0, str(Path(__file__).parent))
from overlap_worker import Network  # noqa: E402
from scenarios import batch, share, weights_of  # noqa: E402

PART, SIZES = "overlap_worker", (2,)


class Clipped(nn.Momentum):
    """MindSpore's optimizer on means that are clipped as those of a window."""

    def construct(self, grads):
        return super().construct(ops.clip_by_global_norm(grads, 0.5))


class Mean(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        loss = self.network(*inputs)
        return loss if self.network.counts_rows else loss[0] / loss[1]


@functools.cache
def own_step(loss, windows):
    """MindSpore's own step in one process, on all rows of each window at once; 1 is the share of rank 0."""
    with eagerly():
        network = Network(loss)
        step = nn.TrainOneStepCell(Mean(network), Clipped(network.trainable_params(), 0.1, 0.9))
        for numbers in windows:
            parts = [share(batch(1), 0, 2) if number == "rank 0 of 1" else batch(number) for number in numbers]
            step(*[Tensor(np.concatenate(arrays)) for arrays in zip(*parts)])
    return weights_of(network)


TWO = ((0, 1), (2, 3))


@pytest.mark.parametrize("name", ["mean", "tokens", "16 bits", "drop"])
def test_windows_train_as_one_process_on_all_rows(name, two):
    expected = own_step("tokens" if name == "tokens" else "mean", TWO)
    assert not np.allclose(expected, weights_of(Network(name)), atol=1e-3)
    # The known wrong answers: the last micro batch is left out, or each rank trains alone.
    tolerance = {"rtol": 2e-3, "atol": 2e-4} if name == "16 bits" else {"rtol": 2e-5, "atol": 2e-6}
    for report in two:
        np.testing.assert_allclose(report[name]["weights"], expected, **tolerance)


@pytest.mark.parametrize("name", ["mean", "tokens"])
def test_messages_go_out_between_the_gradients_of_the_last_micro_batch(name, two):
    for report in two:
        messages = report[name]["messages"] - 1  # The last one, with the weight, is part of a graph.
        assert messages > 2
        for number, events in enumerate(report[name]["events"]):
            sent = [i for i, event in enumerate(events) if event == "message"]
            assert len(sent) == (messages if number % 2 else 0)
            if sent:
                # Of the last of three micro batches, some before its last gradients are there.
                gradients = [i for i, event in enumerate(events) if event != "message"]
                each = len(gradients) // 3
                assert gradients[2 * each] < sent[0] and sent[1] < gradients[-2]


@pytest.mark.parametrize("name", ["16 bits", "drop"])
def test_what_needs_the_whole_gradient_first_is_sent_after_it(name, two):
    for report in two:
        assert "message" not in sum(report[name]["events"], [])


def test_a_rank_without_rows_takes_part(two):
    expected = own_step("mean", ((0, "rank 0 of 1"),))
    for report in two:
        np.testing.assert_allclose(report["no rows"], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("place", ["in a layer", "at the table"])
@pytest.mark.parametrize("steps,failures,rest", [(1, 1, ((1,),)), (2, 1, ((2, 3),)), (1, 2, (("rank 0 of 1",), (2,)))])
def test_a_backward_pass_that_fails_on_one_rank_drops_the_window_on_all(place, steps, failures, rest, two):
    """After a second failure, before anything of its batch was added, the window is that of the other rank."""
    expected = own_step("mean", rest)
    reports = [report[f"fails {place}, {steps}, {failures}"] for report in two]
    assert [report["errors"] for report in reports] == [[], ["of this rank"] * failures]
    for report in reports:
        sent, most = report["sent"]
        assert sent == most > 2
        assert report["updates"] == [len(rest), 1, 0] and report["weight"] == 12 * steps
        assert len(report["warnings"]) >= 1
        np.testing.assert_allclose(report["weights"], expected, rtol=2e-5, atol=2e-6)


def test_a_gradient_that_changes_after_it_was_sent_is_an_error_and_no_update(two):
    for report in two:
        (said,) = report["late"]["errors"]
        assert said.startswith(
            "For 'DataParallel', with overlap a gradient must be complete when the backward pass has "
        )
        assert "made it, but that of 'second.weight' has changed later" in said
        assert report["late"]["is_still"] and report["late"]["updates"] == 0
