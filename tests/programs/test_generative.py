"""Generative models and networks with gradients inside: VAE, diffusion, WGAN-GP, PINN, a custom bprop."""

import mindspore as ms
import numpy as np
from harness import ROWS, UPDATES, Program, checks_of, momentum, regression
from mindspore import Tensor, nn, ops


def normal(*shapes):
    """Batches of normal numbers of these shapes."""

    def build():
        numbers = np.random.default_rng(11)
        return [tuple(numbers.normal(size=(ROWS, *s)).astype(np.float32) for s in shapes) for _ in range(UPDATES)]

    return build


class VAE(nn.Cell):
    """An encoder, a sample with given noise, a decoder; reconstruction and annealed divergence."""

    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.log_variance = nn.Dense(6, 5), nn.Dense(5, 2), nn.Dense(5, 2)
        self.decoder = nn.SequentialCell(nn.Dense(2, 5), nn.ReLU(), nn.Dense(5, 6))
        self.beta = 0.1

    def construct(self, x, noise):
        hidden = ops.tanh(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        decoded = self.decoder(mean + ops.exp(log_variance / 2) * noise)
        divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance)).sum(1)
        return (ops.square(decoded - x).sum(1) + self.beta * divergence).mean()


class UNet(nn.Cell):
    """A diffusion model: noise by a schedule, a small UNet that knows the time, the noise as its target."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(4, 3)
        self.down, self.middle = nn.Conv2d(1, 3, 3, 2, has_bias=True), nn.Conv2d(3, 3, 3, has_bias=True)
        self.norm = nn.GroupNorm(3, 3)
        self.up = nn.Conv2dTranspose(3, 2, 2, 2, has_bias=True)
        self.out = nn.Conv2d(3, 1, 3, has_bias=True)
        self.kept = Tensor(np.cumprod(np.linspace(0.95, 0.7, 4)).astype(np.float32))

    def construct(self, x, noise, time):
        kept = ops.gather(self.kept, time, 0).reshape(-1, 1, 1, 1)
        noisy = ops.sqrt(kept) * x + ops.sqrt(1 - kept) * noise
        hidden = ops.silu(self.down(noisy)) + self.time(time).reshape(-1, 3, 1, 1)
        hidden = ops.silu(self.norm(self.middle(hidden)))
        found = self.out(ops.concat((self.up(hidden), noisy), 1))
        return ops.mse_loss(found, noise)


def diffusion():
    numbers = np.random.default_rng(12)
    times = [numbers.integers(0, 4, ROWS).astype(np.int32) for _ in range(UPDATES)]
    return [(*batch, time) for batch, time in zip(normal((1, 4, 4), (1, 4, 4))(), times)]


class Critic(nn.Cell):
    """WGAN-GP's critic: its loss has the gradient of the critic at points between real and generated rows."""

    def __init__(self):
        super().__init__()
        self.critic = nn.SequentialCell(nn.Dense(3, 4), nn.Tanh(), nn.Dense(4, 1))
        self.gradient = ops.GradOperation()

    def score(self, x):
        return self.critic(x).sum()

    def construct(self, real, fake, share):
        between = share * real + (1 - share) * fake
        slope = self.gradient(self.score)(between)
        norms = ops.sqrt(ops.square(slope).sum(1) + 1e-12)
        penalty = ops.square(norms - 1).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10.0 * penalty


class PINN(nn.Cell):
    """u'' + u = 0 with u(0) = 1, in float64: two derivatives with respect to the input, inside the loss."""

    def __init__(self):
        super().__init__()
        first, second = np.linspace(-1, 1, 5).reshape(5, 1), np.linspace(1, -1, 5).reshape(1, 5)
        self.first = nn.Dense(1, 5, weight_init=Tensor(first), dtype=ms.float64)
        self.second = nn.Dense(5, 1, weight_init=Tensor(second), dtype=ms.float64)
        self.gradient = ops.GradOperation()

    def u(self, x):
        return self.second(ops.tanh(self.first(x))).sum()

    def slope(self, x):
        return self.gradient(self.u)(x).sum()

    def construct(self, x):
        curve = self.gradient(self.slope)(x)
        value = self.second(ops.tanh(self.first(x)))
        start = self.second(ops.tanh(self.first(ops.zeros_like(x))))
        return ops.square(curve + value).mean() + ops.square(start - 1.0).mean()


def points():
    numbers = np.random.default_rng(13)
    return [(numbers.uniform(0, 3, (ROWS, 1)),) for _ in range(UPDATES)]


class Clipped(nn.Cell):
    """Passes its input on, and clips the gradient of each element: not linear in the gradient."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (ops.clip_by_value(dout, Tensor(-self.limit, ms.float32), Tensor(self.limit, ms.float32)),)


class Straight(nn.Cell):
    """Rounds forwards and passes the gradient on: a straight-through estimator."""

    def construct(self, x):
        return ops.round(x)

    def bprop(self, x, out, dout):
        return (dout,)


class Around(nn.Cell):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.second = nn.Dense(4, 3), middle(), nn.Dense(3, 1)

    def construct(self, x, y):
        return ops.square(self.second(self.middle(self.first(x))) - y).mean()


# In a window of several batches it gets the gradient of each batch.
LINEAR = "does in the backward pass .* must be linear"

PROGRAMS = {
    "VAE": Program(VAE, momentum, normal((6,), (2,))),
    "diffusion": Program(UNet, momentum, diffusion, rtol=5e-5),
    "WGAN-GP": Program(Critic, momentum, normal((3,), (3,), (1,)), rtol=1e-4),
    "PINN in float64": Program(PINN, momentum, points),
    "straight-through bprop": Program(lambda: Around(Straight), batches=regression, warned=LINEAR),
    # Where nothing is clipped it is linear; where something is, the gradient of a mean over fewer rows is larger.
    "bprop that clips, out of reach": Program(lambda: Around(lambda: Clipped(10.0)), warned=LINEAR),
    "bprop that clips": Program(lambda: Around(lambda: Clipped(0.02)), nature="bprop"),
}


test_equal_or_named, test_lost_rows_would_be_seen = checks_of(PROGRAMS)
