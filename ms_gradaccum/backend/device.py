"""The device that cells are built for: the current one, or one whose compiler is simulated."""

from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_gradaccum.backend.compiled import op_by_op

_stand_in_for: str | None = None


def device_target() -> str:
    """Return ``"CPU"``, ``"GPU"`` or ``"Ascend"``."""
    return _stand_in_for or ms.get_context("device_target")


@contextmanager
def built_for(target: str) -> Iterator[None]:
    """Build cells for ``target``, while operators still run on the device of this process."""
    global _stand_in_for
    before, _stand_in_for = _stand_in_for, target
    try:
        yield
    finally:
        _stand_in_for = before


def multiply(dtype: ms.Type) -> None:
    """Multiply two matrices on the device of this process. Raise if it has no MatMul for this dtype."""
    # A failed operator may raise its error in the next one, unless the records are cleared as `op_by_op` does.
    with op_by_op():
        ones = Tensor(np.ones((2, 2)), dtype)
        ops.matmul(ones, ones).asnumpy()
