"""The inside of an open window: the one place that knows where its sums and graphs are."""

from ms_gradaccum.advice.advisor import SilentAdvisor


def silent_advisor(owner, network, *others):
    """Return an Advisor that says nothing, for the arguments of one that speaks."""
    return SilentAdvisor(owner, network)


def window_of(step):
    """Return the window of a training step or of an Accumulator with one network."""
    return step.windows[0]


def reducer_of(step):
    """Return what reduces the gradients of the first optimizer over the ranks, and holds their sums."""
    return window_of(step).reducers[0]


def buffer_of(step):
    """Return the sums of the open window, with their weight and loss."""
    return reducer_of(step).buffer


def compiled_micro_steps(step):
    """Return the compiled micro steps by what they were compiled for."""
    return window_of(step).micro_steps.compiled
