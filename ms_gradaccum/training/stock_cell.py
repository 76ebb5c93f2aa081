"""What programs that were written for MindSpore's own training cell expect of ours."""

from typing import Any

from ms_gradaccum._checks import check_bool, sentence, typed

STEP_REMEDY = (
    "Clip with clip=ClipByGlobalNorm(1.0), put a moving average of the weights into a callback's on_update_end(), or "
    "write the step as a loop with an Accumulator."
)


def check_stock_arguments(owner: str, sens: Any, return_grad: Any) -> None:
    """Raise unless the further arguments of MindSpore's cell ask for what they do by default."""
    remedy = (
        "Give mixed_precision=FixedLossScaleManager(1024.0, False), for example, which divides the gradient by the "
        "scale again, and an optimizer without a loss_scale."
    )
    rule = "None or 1.0"
    if sens is not None and (isinstance(sens, bool) or not isinstance(sens, (int, float))):
        raise TypeError(sentence(owner, "sens", rule, typed(sens), remedy))
    if sens is not None and sens != 1:
        raise ValueError(sentence(owner, "sens", rule, sens, remedy))
    remedy = "Take the gradients with value_and_grad, and give them to an Accumulator."
    if check_bool(owner, "return_grad", return_grad, remedy):
        raise ValueError(sentence(owner, "return_grad", "False", True, remedy))
