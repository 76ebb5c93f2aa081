"""Several networks in one window, several optimizers of one network."""

import numpy as np
import pytest
from linear_toy import mse, sgd
from loop_toy import batch
from mindspore import Parameter, Tensor, nn, ops
from refusal import refuses
from step_probe import number

from ms_gradaccum import Accumulator

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.filterwarnings("error:.*runs eagerly")]


class Generator(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.float32([0.0])), "generator.weight")

    def construct(self, noise):
        return noise + self.weight


class CriticLoss(nn.Cell):
    """A critic c * x tells real from made; a penalty keeps c small."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator
        self.weight = Parameter(Tensor(np.float32([1.0])), "critic.weight")

    def construct(self, real, noise):
        made = ops.stop_gradient(self.generator(noise))
        return (self.weight * (made - real)).mean() + ops.square(self.weight).sum()


class GeneratorLoss(nn.Cell):
    def __init__(self, generator, critic):
        super().__init__()
        self.generator = generator
        self.critic = critic

    def construct(self, noise):
        return -(self.critic.weight * self.generator(noise)).mean() + ops.square(self.generator.weight).sum()


REAL = np.float32([[1, 2], [3, 4], [5, 6], [9, 12]])
NOISE = np.float32([[0.5, 1], [-1, 0], [2, 1], [0, 0.25]])


def alternating_by_hand(steps, rate=0.1):
    """Both weights after each window of so many batches: the critic's update first, each with whole means."""
    critic, generator, diary = 1.0, 0.0, []
    for begin in range(0, 4, steps):
        real, noise = REAL[begin : begin + steps].mean(), NOISE[begin : begin + steps].mean()
        # Both gradients are taken at the weights of the window's beginning.
        for_critic, for_generator = noise + generator - real + 2 * critic, -critic + 2 * generator
        critic, generator = critic - rate * for_critic, generator - rate * for_generator
        diary.append((critic, generator))
    return diary


@pytest.fixture
def gan():
    generator = Generator()
    critic_loss = CriticLoss(generator)
    generator_loss = GeneratorLoss(generator, critic_loss)
    optimizers = [nn.SGD([critic_loss.weight], 0.1), nn.SGD([generator.weight], 0.1)]
    return critic_loss, generator_loss, Accumulator([critic_loss, generator_loss], optimizers, 2)


def weights_of(critic_loss, generator_loss):
    return number(critic_loss.weight), number(generator_loss.generator.weight)


@pytest.mark.parametrize("named", [True, False], ids=["a step for each", "one step for both"])
def test_two_networks_train_alternately_as_by_hand(gan, named):
    critic_loss, generator_loss, accumulator = gan
    diary, outputs = [], []
    for real, noise in zip(REAL, NOISE):
        with accumulator.accumulate():
            accumulator.backward(Tensor(real), Tensor(noise), network=critic_loss)
            accumulator.backward(Tensor(noise), network=generator_loss)
            if named:
                accumulator.clip_grad_norm(1e3, network=critic_loss)
                outputs.append(accumulator.step(network=critic_loss))
                outputs.append(accumulator.step(network=generator_loss))
                accumulator.zero_grad(network=critic_loss)
            else:
                accumulator.clip_grad_norm(1e3)
                outputs.append(accumulator.step())
            accumulator.zero_grad()
        diary.append(weights_of(critic_loss, generator_loss))
    assert diary[0] == (1, 0) and diary[1] == diary[2]
    for found, expected in zip(diary[1::2], alternating_by_hand(2)):
        assert found == pytest.approx(expected)
    # An update per batch ends elsewhere.
    assert diary[-1] != pytest.approx(alternating_by_hand(1)[-1], rel=1e-2)
    assert outputs[0] is None and accumulator.driver.updates == 2


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared data", "any data"])
def test_a_critic_may_be_stepped_before_the_generator_sees_it(gan, prepared):
    critic_loss, generator_loss, accumulator = gan
    batches = [(Tensor(real), Tensor(noise)) for real, noise in zip(REAL[:2], NOISE[:2])]
    for real, noise in accumulator.prepare(batches) if prepared else batches:
        with accumulator.accumulate():
            accumulator.backward(real, noise, network=critic_loss)
            accumulator.step(network=critic_loss)
            accumulator.backward(noise, network=generator_loss)
            # The generator's window is as full as the critic's was: it has a norm to clip, here without an effect.
            assert (accumulator.clip_grad_norm(1e3, network=generator_loss) is None) == (real is batches[0][0])
            accumulator.step(network=generator_loss)
    ((critic, _),) = alternating_by_hand(2)[:1]
    # The generator's first batch saw the old critic, 1, its second one the new one.
    assert weights_of(critic_loss, generator_loss) == pytest.approx((critic, 0.1 * (1 + critic) / 2))


def window_of_both(gan, reals, noises):
    critic_loss, generator_loss, accumulator = gan
    for real, noise, for_generator in zip(reals, NOISE, noises):
        with accumulator.accumulate():
            accumulator.backward(Tensor(real), Tensor(noise), network=critic_loss)
            if for_generator is not None:
                accumulator.backward(Tensor(for_generator), network=generator_loss)
            outputs = accumulator.step()
    return outputs


def test_a_network_that_sits_a_batch_out_counts_the_rows_that_it_had(gan):
    outputs = window_of_both(gan, REAL[:2], [NOISE[0], None])
    assert [number(output.weight) for output in outputs] == [4, 2]
    assert weights_of(*gan[:2]) == pytest.approx(alternating_by_hand(2)[0])


def test_a_skipped_update_of_one_network_is_none_of_the_other(gan):
    outputs = window_of_both(gan, [REAL[0], np.nan * REAL[1]], NOISE[:2])
    assert [output.is_updated for output in outputs] == [False, True] and gan[2].updated
    assert weights_of(*gan[:2]) == pytest.approx((1, 0.1))


def test_the_functional_idiom_with_several_networks(gan):
    critic_loss, generator_loss, accumulator = gan
    grads = {critic_loss: (Tensor([4.0]), Tensor([2.0])), generator_loss: (Tensor([-1.0]), Tensor([-3.0]))}
    for index in range(2):
        with accumulator.accumulate():
            for network, pair in grads.items():
                output = accumulator((pair[index],), weight=1 + 2 * index, network=network)
    # (4 + 3 * 2) / 4 and (-1 - 3 * 3) / 4.
    assert weights_of(critic_loss, generator_loss) == pytest.approx((1 - 0.25, 0.25))
    assert number(output.weight) == 4


def test_several_networks_are_told_apart(gan):
    critic_loss, _, accumulator = gan
    with accumulator.accumulate():
        with refuses(ValueError, "'network'"):
            accumulator.backward(Tensor(REAL[0]))
        for call, given in ((accumulator.backward, Tensor(REAL[0])), (accumulator.clip_grad_norm, 1.0)):
            with refuses(ValueError, "'network'", "got Dense"):
                call(given, network=nn.Dense(1, 1))
    with refuses(RuntimeError, "several networks", "accumulator.accumulate()"):
        accumulator.backward(Tensor(REAL[0]), Tensor(NOISE[0]), network=critic_loss)


def run(build_optimizer, batches, clip=None):
    """Train y = a * x + b; return both numbers and the last report."""
    network = nn.Dense(1, 1, "zeros", "zeros")
    accumulator = Accumulator(mse(network), build_optimizer(network), 2)
    for each in batches:
        with accumulator.accumulate():
            accumulator.backward(*each)
            if clip is not None:
                getattr(accumulator, clip[0])(clip[1])
            output = accumulator.step()
    return [number(parameter) for parameter in network.trainable_params()], output


def for_each(network):
    return [nn.SGD([each], 0.01) for each in network.trainable_params()]


def for_both(network):
    return sgd(network, 0.01)


@pytest.mark.parametrize("clip", [None, ("clip_grad_norm", 5.0), ("clip_grad_value", 12.0)], ids=str)
def test_two_optimizers_of_one_network_train_as_one(clip):
    (two, output), (one, expected) = (run(each, [batch(1, 2), batch(3, 4)], clip) for each in (for_each, for_both))
    assert two == pytest.approx(one) and min(two) > 0.01
    # Mean gradients: of the scale -4 * 7.5, of the shift -4 * 2.5.
    assert number(output.grad_norm) == pytest.approx(np.hypot(30, 10))
    for name in ("loss", "grad_norm", "clipped_grad_norm", "weight", "updated", "overflow"):
        assert number(getattr(output, name)) == pytest.approx(number(getattr(expected, name)))
    np.testing.assert_allclose(output.learning_rate.asnumpy(), [0.01, 0.01])
    if clip == ("clip_grad_norm", 5.0):
        # Each clipped by its own norm would move both by 0.05.
        assert two == pytest.approx([0.01 * 5 * 30 / np.hypot(30, 10), 0.01 * 5 * 10 / np.hypot(30, 10)], rel=1e-5)
