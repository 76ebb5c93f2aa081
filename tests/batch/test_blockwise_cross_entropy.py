"""TokenMeanLoss in blocks of tokens or words, with a head or without: against NumPy and against the plain loss."""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from refusal import refuses
from step_probe import keeping_step, number, tensors

from ms_gradaccum import GradAccumulation, MixedPrecision, TokenMeanLoss
from ms_gradaccum.batch.blockwise_cross_entropy import BlockwiseCrossEntropy, blocks_of

# What the compiler makes of it is tested where a test asks for a mode.
pytestmark = pytest.mark.usefixtures("eager")

ROWS, LENGTH, WIDTH, CLASSES = 4, 7, 6, 11
IGNORED = -100
SMOOTHING, Z_LOSS, SOFTCAP = 0.1, 0.01, 3.0
GENERATOR = np.random.default_rng(0)
WEIGHT, BIAS = GENERATOR.normal(size=(CLASSES, WIDTH)), GENERATOR.normal(size=CLASSES)
HIDDEN = GENERATOR.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
TOKEN_WEIGHTS = GENERATOR.uniform(0, 2, size=(ROWS, LENGTH)).astype(np.float32)
LABELS = GENERATOR.integers(0, CLASSES, (ROWS, LENGTH)).astype(np.int32)
# The rows have 7, 6, 1 and 4 tokens.
LABELS[1, 6:], LABELS[2, 1:], LABELS[3, 4:] = IGNORED, IGNORED, IGNORED
VALID = LABELS != IGNORED
# 7 tokens, fewer than words: blocks of words. Budgets of 1, 3 and 6 tokens are blocks of 1, 4 and 9 words.
FEW_HIDDEN, FEW_WEIGHTS = HIDDEN[1:2], TOKEN_WEIGHTS[1:2]
FEW_LABELS = np.int32([[0, 3, 4, 7, 8, 10, IGNORED]])


class Network(nn.Cell):
    """A body that scales its inputs, and a linear head, which `with_logits` says whether it calls."""

    def __init__(self, has_bias=True, with_logits=False, width=WIDTH, classes=CLASSES):
        super().__init__()
        self.scale = Parameter(ops.ones((width,), ms.float32), "scale")
        self.head = nn.Dense(width, classes, Tensor(WEIGHT, ms.float32), Tensor(BIAS, ms.float32), has_bias)
        self.with_logits = with_logits

    def construct(self, hidden):
        hidden = hidden * self.scale
        return self.head(hidden) if self.with_logits else hidden


def loss_cell_of(network, **settings):
    head = None if network.with_logits else network.head
    return TokenMeanLoss(network, head=head, **settings)


def by_hand(hidden, labels, weights, bias=True, smoothing=0.0, z_loss=0.0, softcap=None):
    """The weighted sum, and its gradients: of the hidden states, the scale, the weight and the bias, in float64."""
    x = hidden.reshape(-1, WIDTH).astype(np.float64)
    rates = np.where(labels == IGNORED, 0, weights).reshape(-1, 1).astype(np.float64)
    logits = x @ np.float32(WEIGHT).astype(np.float64).T
    if bias:
        logits = logits + np.float32(BIAS)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    log_sum_exps = np.log(np.exp(logits).sum(1, keepdims=True))
    one_hot = np.eye(CLASSES)[np.where(labels == IGNORED, 0, labels).ravel()]
    target = (1 - smoothing) * one_hot + smoothing / CLASSES
    losses = (target * (log_sum_exps - logits)).sum(1, keepdims=True) + z_loss * log_sum_exps**2
    grads = rates * ((1 + 2 * z_loss * log_sum_exps) * np.exp(logits - log_sum_exps) - target)
    if softcap is not None:
        grads = grads * (1 - (logits / softcap) ** 2)
    of_hidden = grads @ np.float32(WEIGHT).astype(np.float64)
    found = [of_hidden.reshape(hidden.shape), (of_hidden * x).sum(0), grads.T @ x]
    return (losses * rates).sum(), found + [grads.sum(0)] * bias


class LossSum(nn.Cell):
    def __init__(self, loss_cell):
        super().__init__(auto_prefix=False)
        self.loss_cell = loss_cell

    def construct(self, *inputs):
        return self.loss_cell(*inputs)[0]


def in_order(parameters):
    """In the order of `Network`: scale, and weight and bias of the head."""
    names = ["scale", "head.weight", "head.bias"]
    return sorted(parameters, key=lambda each: [not each.name.endswith(name) for name in names])


def gradients(loss_cell, *inputs):
    """The sum, and the gradients of the first input and of all parameters."""
    differentiate = ops.value_and_grad(LossSum(loss_cell), 0, in_order(loss_cell.trainable_params()))
    loss_sum, (of_input, of_weights) = differentiate(*tensors(*inputs))
    return number(loss_sum), [each.asnumpy() for each in (of_input, *of_weights)]


def mean_gradients(step):
    return [kept.asnumpy().copy() for kept in in_order(step.optimizer.kept)]


def assert_close(found, expected, tolerance=1e-6):
    assert [each.shape for each in found] == [each.shape for each in expected]
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1, np.abs(other).max()))


ALL = {"label_smoothing": SMOOTHING, "z_loss": Z_LOSS, "logit_softcap": SOFTCAP, "token_weights": True}
OPTIONS = [{}, *({name: value} for name, value in ALL.items()), ALL]


def assert_formula(with_logits, has_bias, options, blocks, hidden=HIDDEN, labels=LABELS, token_weights=TOKEN_WEIGHTS):
    given = [token_weights] if "token_weights" in options else []
    weights = token_weights if given else np.ones_like(token_weights)
    numbers = [options.get(name, 0) for name in ("label_smoothing", "z_loss")]
    expected = by_hand(hidden, labels, weights, has_bias, *numbers, options.get("logit_softcap"))
    for block_tokens in blocks:
        loss_cell = loss_cell_of(Network(has_bias, with_logits), block_tokens=block_tokens, **options)
        loss_sum, found = gradients(loss_cell, hidden, labels, *given)
        assert loss_sum == pytest.approx(expected[0], rel=1e-6)
        assert_close(found, expected[1])
        valid = weights * (labels != IGNORED)
        assert number(loss_cell(*tensors(hidden, labels, *given))[1]) == pytest.approx(valid.sum())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("with_logits", [False, True], ids=["head", "logits"])
def test_sum_and_gradients_are_those_of_the_formula(with_logits, has_bias, options):
    # 28 tokens: blocks of one size, a shorter last one, one block, and more than there are.
    assert_formula(with_logits, has_bias, options, (7, 5, 28, None))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_in_blocks_of_words_they_are(has_bias, options):
    # Blocks of one size, a shorter last one, and one block.
    assert_formula(False, has_bias, options, (1, 3, 6, None), FEW_HIDDEN, FEW_LABELS, FEW_WEIGHTS)


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all options"])
@pytest.mark.parametrize(("with_logits", "has_bias"), [(False, True), (False, False), (True, True)])
def test_in_both_modes_they_are(with_logits, has_bias, options, network_mode):
    assert_formula(with_logits, has_bias, options, (5,))
    if not with_logits:
        assert_formula(with_logits, has_bias, options, (3,), FEW_HIDDEN, FEW_LABELS, FEW_WEIGHTS)


# Each micro size in one mode.
SIZES = {"PYNATIVE-1": (ms.PYNATIVE_MODE, 1), "GRAPH-2": (ms.GRAPH_MODE, 2)}
SIZES |= {"GRAPH-3": (ms.GRAPH_MODE, 3), "PYNATIVE-4": (ms.PYNATIVE_MODE, 4)}


@pytest.mark.parametrize("mode, micro_size", SIZES.values(), indirect=["mode"], ids=SIZES)
def test_a_window_has_the_mean_over_its_tokens(micro_size, mode):
    loss_sum, expected = by_hand(HIDDEN, LABELS, np.ones_like(TOKEN_WEIGHTS))
    step = keeping_step(loss_cell_of(Network(), block_tokens=3), micro_size, check_loss=False)
    output = step(*tensors(HIDDEN, LABELS))
    assert number(output.weight) == VALID.sum() == 18
    assert number(output.loss) == pytest.approx(loss_sum / 18, rel=1e-6)
    assert_close(mean_gradients(step), [each / 18 for each in expected[1:]])


class Tied(nn.Cell):
    def __init__(self, with_logits):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, embedding_table=Tensor(WEIGHT, ms.float32))
        self.with_logits = with_logits

    def construct(self, tokens):
        hidden = ops.tanh(self.embedding(tokens))
        return ops.matmul(hidden, self.embedding.embedding_table.T) if self.with_logits else hidden


def test_the_table_of_an_embedding_gets_the_sum_of_both_gradients(mode):
    def train(loss_cell):
        step = keeping_step(loss_cell, 2, check_loss=False)
        step(Tensor(np.where(VALID, LABELS, 0)), Tensor(LABELS))
        return mean_gradients(step)

    network = Tied(with_logits=False)
    loss_cell = TokenMeanLoss(network, head=network.embedding.embedding_table, block_tokens=5)
    assert len(loss_cell.trainable_params()) == 1
    expected = train(TokenMeanLoss(Tied(with_logits=True)))
    assert_close(train(loss_cell), expected)
    # The known wrong answer: the gradient of the embedding alone.
    frozen = TokenMeanLoss(network, head=Parameter(Tensor(WEIGHT, ms.float32), "frozen", requires_grad=False))
    assert np.abs(train(frozen)[0] - expected[0]).max() > 1e-3


def half_network(network):
    network.to_float(ms.float16)
    return {}


HALVES = {
    "network": half_network,
    **{
        level: lambda network, level=level: {"mixed_precision": MixedPrecision(ms.float16, level, init_scale=128)}
        for level in ("O1", "O2", "O3", "auto")
    },
}


@pytest.fixture
def products(monkeypatch):
    """The inputs and the result of each product with a block of the head, op by op."""
    seen = []
    logits = BlockwiseCrossEntropy.logits

    def watched(self, part, head, bias):
        seen.append((part, head, logits(self, part, head, bias)))
        return seen[-1][-1]

    if ms.get_context("mode") == ms.PYNATIVE_MODE:
        monkeypatch.setattr(BlockwiseCrossEntropy, "logits", watched)
    return seen


@pytest.mark.parametrize("name", HALVES)
def test_products_in_16_bits_have_sums_in_32(name, mode, products):
    network = Network()
    settings = HALVES[name](network)
    # In op by op mode, a micro batch has 7 tokens and blocks of words.
    micro_size = 4 if mode == ms.PYNATIVE_MODE else 2
    step = keeping_step(loss_cell_of(network, block_tokens=5), micro_size, check_loss=False, **settings)
    output = step(*tensors(HIDDEN, LABELS))
    loss_sum, expected = by_hand(HIDDEN, LABELS, np.ones_like(TOKEN_WEIGHTS))
    assert number(output.updated) and output.loss.dtype == ms.float32
    assert number(output.loss) == pytest.approx(loss_sum / 18, rel=2e-3)
    found = mean_gradients(step)
    assert_close(found, [each / 18 for each in expected[1:]], 5e-3)
    # Float32 would be nearer: the products are in 16 bits.
    assert np.abs(found[1] - expected[2] / 18).max() > 1e-6
    if mode == ms.PYNATIVE_MODE:
        assert {each.dtype for part, head, _ in products for each in (part, head)} == {ms.float16}


def test_the_sums_over_blocks_do_not_overflow_in_float16(mode):
    # Blocks of 50 tokens of size 100 at equal probabilities: 2500 each, 100000 together, which no float16 holds.
    network = nn.Dense(1, 2, Tensor(np.zeros((2, 1), np.float32)), has_bias=False).to_float(ms.float16)
    inputs = np.full((2000, 1), 100, np.float32), np.zeros(2000, np.int32)
    in_blocks = gradients(TokenMeanLoss(nn.Identity(), head=network, block_tokens=50), *inputs)[1][1]
    np.testing.assert_allclose(in_blocks, [[-1e5], [1e5]], rtol=1e-3)
    assert np.isinf(gradients(TokenMeanLoss(network), *inputs)[1][1]).all()


def test_the_sum_over_blocks_of_words_does_not_overflow_in_float16(mode):
    # At equal probabilities, 4 blocks of 2 words give 40000, 40000, -40000 and -30000: 80000 is no float16.
    weight = np.float32([[16000], [16000], [16000], [16000], [-16000], [-16000], [-24000], [0]])
    head = nn.Dense(1, 8, Tensor(weight), has_bias=False).to_float(ms.float16)
    inputs = np.zeros((4, 1), np.float32), np.full(4, 7, np.int32), np.full(4, 10, np.float32)
    loss_cell = TokenMeanLoss(nn.Identity(), head=head, block_tokens=1, token_weights=True)
    differentiate = ops.value_and_grad(LossSum(loss_cell), 0)
    np.testing.assert_allclose(differentiate(*tensors(*inputs))[1].asnumpy(), np.full((4, 1), 1e4), rtol=1e-3)


def test_evaluation_is_the_same_loss_and_computes_no_more_than_a_block(products):
    def shapes():
        found = [logits.shape for _, _, logits in products]
        products.clear()
        return found

    loss_cell = GradAccumulation(loss_cell_of(Network(), block_tokens=5), 2).set_train(False)
    loss_sum, tokens = loss_cell(*tensors(HIDDEN, LABELS))
    assert number(loss_sum) == pytest.approx(by_hand(HIDDEN, LABELS, np.ones_like(TOKEN_WEIGHTS))[0], rel=1e-6)
    assert number(tokens) == 18 and shapes() == [(5, CLASSES)] * 5 + [(3, CLASSES)]
    # The backward pass computes each of them once more.
    gradients(loss_cell.network, HIDDEN, LABELS)
    assert shapes() == ([(5, CLASSES)] * 5 + [(3, CLASSES)]) * 2
    gradients(loss_cell_of(Network(), block_tokens=3), FEW_HIDDEN, FEW_LABELS)
    assert shapes() == [(7, 4), (7, 4), (7, 3)] * 2


def test_logits_in_16_bits_have_a_float32_copy_of_one_block(products):
    network = Network(with_logits=True).to_float(ms.float16)
    gradients(loss_cell_of(network, block_tokens=5), HIDDEN, LABELS)
    assert {part.shape[0] for part, _, _ in products} == {5, 3}


def test_small_losses_are_exact(mode):
    # A loss of 1e-4, of which the CPU's LogSoftmax would miss a hundredth.
    logits = np.float32([[9.21, 0], [0, 9.21], [0, 120]])
    loss_sum, tokens = TokenMeanLoss(nn.Identity())(Tensor(logits), Tensor(np.int32([0, 1, 0])))
    assert number(loss_sum) - 120 == pytest.approx(2 * np.log1p(np.exp(-9.21)), abs=1e-5)
    loss_sum, tokens = TokenMeanLoss(nn.Identity())(Tensor(logits[:2]), Tensor(np.int32([0, 1])))
    assert number(loss_sum) == pytest.approx(2 * np.log1p(np.exp(-9.21)), rel=1e-3)


def test_small_losses_are_exact_over_blocks_of_words(mode):
    # The words of 9.21 and of 0 are in different blocks.
    weight = np.float32([[9.21, 0], [-100, -100], [0, 9.21], [-100, -100]])
    head = nn.Dense(2, 4, Tensor(weight), has_bias=False)
    loss_cell = TokenMeanLoss(nn.Identity(), head=head, block_tokens=1)
    loss_sum = loss_cell(Tensor(np.eye(2, dtype=np.float32)), Tensor(np.int32([0, 2])))[0]
    assert number(loss_sum) == pytest.approx(2 * np.log1p(np.exp(-9.21)), rel=1e-3)


def test_a_block_of_words_may_be_excluded_by_its_bias(mode):
    bias = np.where(np.arange(CLASSES) < 8, BIAS, -np.inf)
    head = nn.Dense(WIDTH, CLASSES, Tensor(WEIGHT, ms.float32), Tensor(bias, ms.float32))
    inputs = FEW_HIDDEN, np.int32([[0, 1, 2, 3, 4, 7, IGNORED]])
    loss_sum, found = gradients(TokenMeanLoss(nn.Identity(), head=head, block_tokens=3), *inputs)
    smaller = nn.Dense(WIDTH, 8, Tensor(WEIGHT[:8], ms.float32), Tensor(BIAS[:8], ms.float32))
    expected, others = gradients(TokenMeanLoss(nn.Identity(), head=smaller), *inputs)
    assert loss_sum == pytest.approx(expected, rel=1e-6)
    assert_close([found[0], found[1][:8]], [others[0], others[1]])


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_no_class_is_an_error(label, mode):
    """MindSpore's own loss takes -1 for the last class."""
    # In blocks of tokens, and of words that the block divides or does not.
    for hidden, labels, block_tokens in (
        (HIDDEN, LABELS, None),
        (FEW_HIDDEN, FEW_LABELS, 1),
        (FEW_HIDDEN, FEW_LABELS, 3),
    ):
        labels = labels.copy()
        labels[0, 0] = label
        with pytest.raises((RuntimeError, ValueError), match="GatherD"):
            number(loss_cell_of(Network(), block_tokens=block_tokens)(*tensors(hidden, labels))[0])


def test_the_size_of_a_block():
    def limits(*arguments):
        return [(words, tokens) for number, words, tokens in blocks_of(*arguments)[0]]

    whole = (0, None)
    assert limits(10, 5, True, 4) == [(whole, (0, 4)), (whole, (4, 8)), (whole, (8, 10))]
    assert limits(10, 5, True, 10) == limits(10, 5, True, 99) == [(whole, whole)]
    # The longer side is cut, but never the words of given logits.
    assert limits(5, 10, True, 2) == [((0, 4), whole), ((4, 8), whole), ((8, 10), whole)]
    assert limits(5, 10, False, 2) == [(whole, (0, 2)), (whole, (2, 4)), (whole, (4, 5))]
    # 16 MiB of float32, or a thirty-second part of the table.
    assert limits(1024, 100000, True, None)[0] == ((0, 4096), whole)
    assert limits(10**6, 1024, False, None)[0] == (whole, (0, 31250))
    assert len(limits(16384, 131072, True, None)) == 32
    assert limits(4, 10**8, False, None)[0] == (whole, (0, 1))


def test_open_lengths_are_one_block(mode):
    if mode == ms.PYNATIVE_MODE:
        pytest.skip("op by op, all lengths are known")
    cell = LossSum(loss_cell_of(Network(), block_tokens=5))
    cell.set_inputs(Tensor(shape=[None, LENGTH, WIDTH], dtype=ms.float32), Tensor(shape=[None, LENGTH], dtype=ms.int32))
    for rows in (2, 4):
        expected = by_hand(HIDDEN[:rows], LABELS[:rows], np.ones((rows, LENGTH)))[0]
        assert number(cell(*tensors(HIDDEN[:rows], LABELS[:rows]))) == pytest.approx(expected, rel=1e-6)


def test_every_form_of_a_head(mode):
    expected = by_hand(HIDDEN, LABELS, np.ones_like(TOKEN_WEIGHTS))[0]
    linear = mint.nn.Linear(WIDTH, CLASSES)
    linear.weight.set_data(Tensor(WEIGHT, ms.float32))
    linear.bias.set_data(Tensor(BIAS, ms.float32))
    dense = Network().head
    for head in (linear, dense, (dense.weight, dense.bias)):
        assert number(TokenMeanLoss(nn.Identity(), head=head)(*tensors(HIDDEN, LABELS))[0]) == pytest.approx(expected)
    expected = by_hand(HIDDEN, LABELS, np.ones_like(TOKEN_WEIGHTS), bias=False)[0]
    found = TokenMeanLoss(nn.Identity(), head=dense.weight)(*tensors(HIDDEN, LABELS))[0]
    assert number(found) == pytest.approx(expected)


HEADS = [
    (TypeError, lambda: nn.Conv1d(2, 2, 1), "Conv1d"),
    (TypeError, lambda: nn.Dense(2, 2, activation="relu"), "without an activation"),
    (TypeError, lambda: 3, "a linear layer"),
    (ValueError, lambda: Parameter(ops.ones((2, 3, 4), ms.float32)), "(2, 3, 4)"),
    (
        ValueError,
        lambda: (Parameter(ops.ones((2, 3), ms.float32)), Parameter(ops.ones((3,), ms.float32))),
        "(2, 3), (3,)",
    ),
]


@pytest.mark.parametrize(("error", "head", "key"), HEADS)
def test_a_head_that_is_none(error, head, key):
    with refuses(error, "'head'", key):
        TokenMeanLoss(nn.Identity(), head=head())


def test_other_wrong_arguments():
    with refuses(ValueError, "'label_smoothing'"):
        TokenMeanLoss(nn.Identity(), label_smoothing=1)
    for name, value in (("block_tokens", 0), ("z_loss", -1.0), ("label_smoothing", -0.1), ("logit_softcap", 0.0)):
        with refuses(ValueError, f"'{name}'"):
            TokenMeanLoss(nn.Identity(), **{name: value})


def test_hidden_states_and_weights_that_do_not_fit():
    network = Network()
    with refuses(ValueError, "Give the part"):
        TokenMeanLoss(Network(with_logits=True), head=network.head)(*tensors(HIDDEN, LABELS))
    with refuses(ValueError, "Give one weight"):
        loss_cell_of(network, token_weights=True)(*tensors(HIDDEN, LABELS, TOKEN_WEIGHTS[:, 0]))


PROGRAM = """
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from pathlib import Path
from ms_gradaccum import TokenMeanLoss, TrainOneStepCell

def status(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if key in line)

ms.set_context(mode=ms.GRAPH_MODE)
head = nn.Dense(4, 65536, has_bias=False)
loss_cell = TokenMeanLoss(nn.Identity(), head=head, block_tokens=128)
step = TrainOneStepCell(loss_cell, nn.SGD(head.trainable_params(), 0.1), check_loss=False)
inputs = Tensor(np.ones((1024, 4), np.float32)), Tensor(np.zeros(1024, np.int32))
resident = status("VmRSS")
step(*inputs).loss.asnumpy()
print((status("VmHWM") - resident) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the memory is read from /proc")
def test_a_graph_has_tables_of_few_blocks_at_a_time(tmp_path, monkeypatch):
    monkeypatch.delenv("MS_JIT")
    # All blocks have 256 MB. What waits for no block before it would be there from the begin on.
    program = tmp_path / "program.py"  # The compiler reads its source.
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 320
