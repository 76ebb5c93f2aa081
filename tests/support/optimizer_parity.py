"""Helpers of the optimizer tests: a tiny network, the stock whole-batch step as oracle, and a comparison.

The gradients of the tiny network are bounded away from zero: inputs and weights are positive and the targets
lie far from the predictions, so no entry is a difference of large numbers, and a relative rounding error of
1e-7 in a loss stays one in every gradient. The targets change sign once, so that momentum and sign-based
optimizers see a gradient that turns.
"""

from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from quick_mindspore import compiling, eagerly

from ms_gradaccum import GradAccumulation, TrainOneStepCell
from ms_gradaccum.backend.compiled import execution_mode

ROWS = 12
WINDOWS = 4
# Largest deviation, relative to the largest entry of the same tensor, that float32 rounding may cause in
# WINDOWS updates, and the least that a wrong way of accumulating must cause to count as detected.
ROUNDING = 2e-6
DETECTED = 100
BOTH = [ms.GRAPH_MODE, ms.PYNATIVE_MODE]


def is_of_mint(optimizer):
    """True for one of mindspore.mint, which change nothing on CPU in PYNATIVE mode."""
    return type(optimizer).__module__.startswith("mindspore.mint.")


def needs_graph(optimizer):
    """True if it computes something else where nothing at all is compiled. Some round ``1 - beta`` in Python then."""
    return is_of_mint(optimizer) or type(optimizer).__module__.rpartition(".")[2] in ("adamw", "radam", "nadam")


def accumulated_step(network, optimizer, micro_size):
    compile = True if is_of_mint(optimizer) else None
    step = TrainOneStepCell(GradAccumulation(network, micro_size), optimizer, compile=compile, check_loss=False)
    return step.set_train()


def dense(in_channels, out_channels, low, high, seed):
    """A Dense layer whose weights lie between low and high, the same for the same seed."""
    random = np.random.default_rng(seed)
    weight = Tensor(random.uniform(low, high, (out_channels, in_channels)).astype(np.float32))
    bias = Tensor(random.uniform(low, high, out_channels).astype(np.float32))
    return nn.Dense(in_channels, out_channels, weight_init=weight, bias_init=bias)


class RowLoss(nn.Cell):
    """Mean over the rows of ``factor`` times the squared error.

    With factors of one it is the loss that is trained. Other factors turn the very same oracle into a
    wrong way of accumulating, such as the sum of the micro batches' means.
    """

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def construct(self, x, y, factor):
        return (ops.square(self.backbone(x) - y).mean(axis=1) * factor).mean()


def one_layer():
    return RowLoss(dense(3, 2, 0.2, 0.6, seed=2))


def batches():
    """Batches of ROWS rows as NumPy arrays (x, y, factor), one for each window."""
    random = np.random.default_rng(3)
    result = []
    for i in range(WINDOWS):
        x = random.uniform(0.5, 1.5, (ROWS, 3)).astype(np.float32)
        y = random.uniform(4, 8, (ROWS, 2)).astype(np.float32) * (-1 if i == 2 else 1)
        result.append((x, y, np.ones(ROWS, np.float32)))
    return result


def wrong_batches(data, micro_size):
    """Batches on which a whole-batch step does what a wrong accumulation would do, by the name of the mistake."""
    spans = np.array_split(np.arange(ROWS), micro_size)
    sizes = np.concatenate([np.full(len(span), len(span), np.float32) for span in spans])
    # A micro batch repeated until it fills the batch has the mean gradient of the micro batch alone.
    alone = [[tuple(np.resize(part[span], part.shape) for part in batch) for span in spans] for batch in data]
    mistakes = {
        "sum of means": [(x, y, ROWS / sizes) for x, y, _ in data],
        "an update per micro batch": [batch for window in alone for batch in window],
        "last micro batch only": [window[-1] for window in alone],
    }
    if ROWS % micro_size:
        mistakes["mean of means"] = [(x, y, ROWS / sizes / micro_size) for x, y, _ in data]
    return mistakes


def parameters_of(optimizer):
    """Every Parameter of an optimizer by name: weights, state, learning rates.

    Optimizers of mindspore.experimental and mindspore.mint keep some in dicts, where get_parameters() is blind.
    """
    found = {parameter.name: parameter for parameter in optimizer.get_parameters()}
    holders = [vars(optimizer), *getattr(optimizer, "param_groups", [])]
    for value in (value for holder in holders for value in holder.values()):
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, Parameter):
                found.setdefault(item.name, item)
    return found


def all_parameters(network, optimizer):
    return parameters_of(optimizer) | {parameter.name: parameter for parameter in network.get_parameters()}


def values_of(parameters):
    return {name: parameter.asnumpy().copy() for name, parameter in parameters.items()}


def restore(parameters, values):
    # After a set_data() the stock step trains copies of some parameters, which asnumpy() does not see.
    for name, value in values.items():
        ops.assign(parameters[name], Tensor(value))


def load(parameters, values):
    """Do to the parameters what load_param_into_net() does."""
    for name, value in values.items():
        parameters[name].set_data(Tensor(value))


def train(step, data):
    """Run a step over NumPy batches and return what it returned."""
    return [step(*(Tensor(part.astype(np.float32)) for part in batch)) for batch in data]


class WholeBatch:
    """Return weights and optimizer state after the stock step, from one start, with whatever batches.

    It runs op by op whatever the mode of the test, but for what needs a graph. Where the stock step trains in both
    modes it leaves the same bits in both.
    """

    def __init__(self, make_network, make_optimizer, data=None, compiled=False):
        network = make_network()
        optimizer = make_optimizer(network)
        self.compiled = compiled or needs_graph(optimizer)
        self.step = nn.TrainOneStepCell(network, optimizer).set_train()
        self.trained = [parameter.name for parameter in optimizer.parameters]
        self.parameters = all_parameters(network, optimizer)
        self.start = values_of(self.parameters)
        self.data = batches() if data is None else data
        self.losses, self.values = self.train(self.data)

    def train(self, data):
        """Return the losses and all parameters after training on ``data`` from the start."""
        with execution_mode(ms.GRAPH_MODE) if self.compiled else eagerly():
            restore(self.parameters, self.start)
            losses = [float(loss.asnumpy()) for loss in train(self.step, data)]
        return losses, values_of(self.parameters)


def accumulate(make_network, make_optimizer, micro_size, modes, data=None, compiled=False, loaded=BOTH):
    """Train with micro batches in each mode, from the same start; return {mode: (outputs, all parameters)}.

    The results ("loaded", mode), of the modes in ``loaded``, are from the start again, loaded like a checkpoint. GRAPH
    mode comes first: MindSpore compiles no optimizer with a @jit of its own that has run in PYNATIVE mode before. What
    the package compiles beside network and update, or around them in PYNATIVE mode, is one for all: only if
    ``compiled`` is set.
    """
    data = batches() if data is None else data
    network = make_network()
    optimizer = make_optimizer(network)
    parameters = all_parameters(network, optimizer)
    start = values_of(parameters)
    step = accumulated_step(network, optimizer, micro_size)
    results = {}
    # The one layer is compiled with one optimizer of all.
    parts = ("the optimizer",) if make_network is one_layer else ("the network", "the optimizer")
    with nullcontext() if compiled else compiling(*parts):
        for mode in modes:
            is_compiled = compiled or mode == ms.GRAPH_MODE or needs_graph(optimizer)
            for key, begin in [(mode, restore), (("loaded", mode), load)][: 2 if mode in loaded else 1]:
                with execution_mode(mode) if is_compiled else eagerly():
                    begin(parameters, start)
                    results[key] = train(step, data), values_of(parameters)
    return results


def deviation(found, expected):
    """Largest deviation of one array relative to the largest entry of the expected one."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    error = np.max(np.abs(found - expected), initial=0.0)
    if error == 0:
        return 0.0
    scale = np.max(np.abs(expected))
    return error / scale if np.isfinite(error) and scale > 0 else np.inf


def deviations(found, expected):
    assert set(found) == set(expected)
    return {name: deviation(found[name], expected[name]) for name in expected}


def assert_same(found, expected, tolerance=ROUNDING):
    too_far = {name: error for name, error in deviations(found, expected).items() if error > tolerance}
    assert not too_far, f"relative deviation above {tolerance}: {too_far}"


def assert_not_vacuous(whole, micro_size, tolerance=ROUNDING, detected=DETECTED):
    """Check that the whole batch moved every weight and that the mistakes would be told from it."""
    for name in whole.trained:
        assert deviation(whole.values[name], whole.start[name]) > detected * tolerance, f"{name} hardly moved"
    for mistake, data in wrong_batches(whole.data, micro_size).items():
        _, wrong = whole.train(data)
        assert max(deviations(wrong, whole.values).values()) > detected * tolerance, f"{mistake} would pass"


def assert_like_whole_batch(whole, outputs, values, tolerance=ROUNDING):
    """Compare losses, weights and optimizer state after training with micro batches with the whole batch's."""
    assert [bool(output.updated.asnumpy()) for output in outputs] == [True] * len(whole.data)
    losses = [float(output.loss.asnumpy()) for output in outputs]
    np.testing.assert_allclose(losses, whole.losses, rtol=tolerance)
    assert_same(values, whole.values, tolerance)
    if "global_step" in values:
        assert values["global_step"] == len(whole.data)  # once per update, not once per micro batch
