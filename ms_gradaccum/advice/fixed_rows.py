"""The reason for the error of a micro batch whose network takes only so many rows."""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from ms_gradaccum.advice.rows import Rows
from ms_gradaccum.backend.compiled import op_by_op
from ms_gradaccum.backend.snapshot import kept

_OWNER = "GradAccumulation"


def explain_fixed_rows(
    network: nn.Cell, inputs: tuple[Any, ...], size: int, error: Exception
) -> None:
    """Let the error of a micro batch begin with the reason if the network takes the whole batch alone."""
    batch = Rows.of(inputs, network.batch_axis)
    loss = network.loss_of(batch.structure)

    def takes(rows: Rows) -> bool:
        try:
            with kept(network.network), op_by_op():
                loss(Tensor(1.0, ms.float32), *rows.tensors)[0].asnumpy()
        except Exception:
            return False
        return True

    if takes(batch) and not takes(batch.take(range(size))):
        remedy = (
            "Let its shapes follow its inputs, or give smaller batches with accumulation_steps."
        )
        if any(not tensor.shape for tensor in batch.tensors):
            remedy = "If they are the values of a single row, call dataset.batch(32), for example."
        text = (
            f"For '{_OWNER}', the network takes only the {batch.size} rows of the batch, but got "
            f"the {size} rows of a micro batch. {remedy}"
        )
        error.args = (f"{network.with_owner(text)}\n{error}", *error.args[1:])
