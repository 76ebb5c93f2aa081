"""Python runs this when a process begins that has this folder in PYTHONPATH: it breaks the package there.

Only the workers of `python -m ms_gradaccum test` are broken, in the ways that BROKEN names. With EAGER set, GRAPH mode
is PYNATIVE mode, for which next to nothing is compiled.
"""

import os
import sys
from pathlib import Path


def division(package):
    """The gradients are divided by half the count."""
    original = package.gradients.buffer.reciprocal

    def twice(weight):
        return original(weight) * 2.0

    for module in list(sys.modules.values()):
        if getattr(module, "reciprocal", None) is original:
            module.reciprocal = twice


def clip(package):
    """The norm is that of the sums, and not of the means."""
    mean_gradients = package.training.mean_gradients

    def scaled(self, factor, norm, *limit):
        return factor * self.clip.factor(norm * 26.0, *limit)

    mean_gradients.NormClip.scaled = scaled


def reduction(package):
    """Nothing is added up over the ranks."""
    collectives = package.parallel.collectives

    def own(self, values):
        return values

    collectives.AllReduce.construct = own


def state(package):
    """A state is read, and nothing of it is used."""
    package.checkpoint.load.load_state = lambda step, directory: None


if sys.orig_argv[-1].endswith("worker.py") and "MS_GRADACCUM_SELF_TEST" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    import mindspore
    import quick_mindspore

    quick_mindspore.install()
    if "EAGER" in os.environ:
        os.environ["MS_JIT"] = "0"
    if "BROKEN" in os.environ:
        import ms_gradaccum
        import ms_gradaccum.checkpoint.load
        import ms_gradaccum.gradients.buffer
        import ms_gradaccum.parallel.collectives
        import ms_gradaccum.training.mean_gradients

        for name in os.environ["BROKEN"].split():
            globals()[name](ms_gradaccum)
    if "EAGER" in os.environ:
        from ms_gradaccum.tools.self_test import training

        training.MODES["GRAPH"] = mindspore.PYNATIVE_MODE
