"""Whether something computes in 16 bits."""

from collections.abc import Iterable

import mindspore as ms
from mindspore import Parameter, nn


def levels_of(cells: Iterable[nn.Cell]) -> set[str]:
    """Return the levels of mixed precision that ``amp.auto_mixed_precision`` has converted cells to."""
    return {getattr(cell, "_amp_level", None) or "O0" for cell in cells} - {"O0"}


def computes_in_16_bits(parameters: Iterable[Parameter], cells: Iterable[nn.Cell]) -> bool:
    """Return whether there are 16-bit weights, or cells that were told to compute in 16 bits."""
    cells = list(cells)
    return (
        any(parameter.dtype in (ms.float16, ms.bfloat16) for parameter in parameters)
        or bool(levels_of(cells))
        or any(cell.get_flags().get("fp16") or cell.get_flags().get("bf16") for cell in cells)
    )
