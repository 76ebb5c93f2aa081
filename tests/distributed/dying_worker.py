"""A rank that ends with an error while the other one waits for its gradients."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init

from ms_gradaccum import TrainOneStepCell

init()
ms.set_context(mode=ms.PYNATIVE_MODE)
network = nn.Dense(1, 1)
step = TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD(network.trainable_params(), 0.1))
x = Tensor(np.ones((2, 1), np.float32))
step(x, x)
if get_rank() == 1:
    raise KeyError("the label 'cat' is not known")
step(x, x)
