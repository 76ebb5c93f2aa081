"""How noisy the gradient of a row is beside the gradient: the batch size from which larger ones help less and less."""

import math

from ms_gradaccum.training.step_output import StepOutput

# Windows that there must be, and so many standard errors by which the gradient must be more than noise.
_LEAST, _ERRORS = 10, 2.0
# Windows that the averages reach back, as the noise scale changes in a training.
_MEMORY = 1000


class NoiseScale:
    """The simple noise scale of "An Empirical Model of Large-Batch Training" (McCandlish et al., 2018), appendix A.

    A window has micro batches of weights w_i, gradients S_i of their sums of losses, and a mean gradient g over the
    weight W of all. What rows have of their own in it, tr(C), and the square of the gradient without it, |G|^2, are::

        tr(C) = (sum(|S_i|^2 / w_i) - W |g|^2) / (K - 1),    |G|^2 = |g|^2 - tr(C) / W

    Both are averaged over windows, and divided last: the mean of ratios would not be the ratio.
    """

    def __init__(self) -> None:
        self.windows = 0
        self.trace = self.square = self.square_of_squares = 0.0

    def add(self, output: StepOutput) -> None:
        """Take in a window that has made an update, if it has several micro batches and these were noted."""
        if output.noise is None or output.noise[1] < 2 or not output.updated.asnumpy():
            return
        squares, count = output.noise
        weight, norm = float(output.weight.asnumpy()), float(output.grad_norm.asnumpy())
        trace = (squares - weight * norm**2) / (count - 1)
        square = norm**2 - trace / weight
        self.windows += 1
        part = 1 / min(self.windows, _MEMORY)
        self.trace += part * (trace - self.trace)
        self.square += part * (square - self.square)
        self.square_of_squares += part * (square**2 - self.square_of_squares)

    def value(self) -> float | None:
        """Return tr(C) / |G|^2 in rows or tokens; None while the gradient cannot be told from noise."""
        if self.windows < _LEAST:
            return None
        error = math.sqrt(max(self.square_of_squares - self.square**2, 0.0) / min(self.windows, _MEMORY))
        return self.trace / self.square if self.square > _ERRORS * error else None
