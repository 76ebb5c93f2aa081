r"""How far a window may be from the whole batch on a device, and why.

Both add up the same products and round them at other places. Two things differ:

- **Sums.** An entry of a gradient is a sum of `n` terms: rows, times the length of the longest sum inside the network.
  A device adds them in float32, in an order that depends on the shapes. Each addition is off by at most half a unit in
  the last place, :math:`u = 2^{-24}` of the sum so far. These errors go both ways and grow like a random walk:
  :math:`\sqrt{n} u` relative to the terms.
- **Roundings.** On the way from an input to a gradient there are `d` results that are rounded to the dtype of the
  layers, or whose factors are: another random walk, :math:`\sqrt{d} u'`. `u'` is :math:`2^{-24}` in float32,
  :math:`2^{-11}` in float16 and :math:`2^{-8}` in bfloat16. Matrix units may round the factors of float32 products:
  GPUs to TF32, Ascend to HF32 or, in older ones, to float16, all of them with 11 bits, :math:`u' = 2^{-11}`. They do so
  for some shapes and not for others, so a micro batch and the whole batch can be rounded differently.

The tolerance is :math:`4 (\sqrt{n} u + \sqrt{d} u')`, four standard deviations if each error were as large as it can
be. It is relative: losses and norms to their size; parameters to the largest way that one of them has gone from the
start, plus the rounding of the parameters themselves, of which each update adds one. Wrong windows are off by a factor:
a sum in place of a mean of 3 micro batches by 2, an update per micro batch or a missing rank by tenths.

The toy has one weight and inputs of a few bits, which all these dtypes hold exactly. Its tolerance is that of the
float32 update alone, on all devices.
"""

import math

import mindspore as ms

_DEVIATIONS = 4.0
_FLOAT32 = 2.0**-24
# Relative half units in the last place.
_ROUNDING = {ms.float32: _FLOAT32, ms.float16: 2.0**-11, ms.bfloat16: 2.0**-8}
# Of the factors of a product in float32.
_MATRIX_UNIT = {"CPU": _FLOAT32, "GPU": 2.0**-11, "Ascend": 2.0**-11}

# The toy's weight after one update, and how far it may be: a loss, its mean, its gradient, the product with the rate.
TOY_WEIGHT = 2.04
TOY_TOLERANCE = 8 * _FLOAT32


def tolerance(device: str, dtype: ms.Type, terms: int, roundings: int) -> float:
    """Return the largest relative difference that rounding explains.

    Args:
        device: ``"CPU"``, ``"GPU"`` or ``"Ascend"``.
        dtype: What the layers compute in.
        terms: The length of the longest sum.
        roundings: How many roundings follow each other between an input and a gradient.
    """
    of_layers = max(_ROUNDING[dtype], _MATRIX_UNIT[device])
    return _DEVIATIONS * (math.sqrt(terms) * _FLOAT32 + math.sqrt(roundings) * of_layers)


def rounding_of(largest: float, moved: float, updates: int) -> float:
    """Return what rounding parameters themselves adds, relative to how far they have moved."""
    return _DEVIATIONS * math.sqrt(updates) * _FLOAT32 * largest / moved if moved else 0.0
