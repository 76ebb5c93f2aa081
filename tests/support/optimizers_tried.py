"""Optimizers with settings that tests train with, by name."""

from mindspore import mint, nn, ops
from mindspore.experimental import optim as experimental


class UserMomentum(nn.Optimizer):
    """An optimizer as a user would write it, after the example in MindSpore's documentation."""

    def __init__(self, params, learning_rate, momentum, weight_decay):
        super().__init__(learning_rate, params, weight_decay)
        self.moments = self.parameters.clone(prefix="moments", init="zeros")
        self.momentum = momentum

    def construct(self, gradients):
        rate = self.get_lr()
        gradients = self.scale_grad(self.decay_weight(gradients))
        done = ops.assign_add(self.global_step, self.global_step_increase_tensor)
        for weight, moment, gradient in zip(self.parameters, self.moments, gradients):
            done = ops.depend(done, ops.ApplyMomentum()(weight, moment, rate, gradient, self.momentum))
        return done


# Where an optimizer divides by a root of squared gradients, its epsilon is about as large as the gradients: with the
# default it hardly sees their size, and a sum in place of a mean would leave nearly the same weights.
OPTIMIZERS = {
    "SGD": (nn.SGD, {"learning_rate": 0.01}),
    "SGD, dampened": (nn.SGD, {"learning_rate": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "SGD, Nesterov": (nn.SGD, {"learning_rate": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Momentum": (nn.Momentum, {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "Momentum, Nesterov": (nn.Momentum, {"learning_rate": 0.01, "momentum": 0.9, "use_nesterov": True}),
    "Adam": (nn.Adam, {"learning_rate": 0.05, "eps": 1.0, "weight_decay": 0.1}),
    "Adam, Nesterov": (nn.Adam, {"learning_rate": 0.05, "eps": 1.0, "use_nesterov": True}),
    "Adam, AMSGrad": (nn.Adam, {"learning_rate": 0.05, "eps": 1.0, "use_amsgrad": True}),
    "AdamWeightDecay": (nn.AdamWeightDecay, {"learning_rate": 0.05, "eps": 1.0, "weight_decay": 0.1}),
    "AdamOffload": (nn.AdamOffload, {"learning_rate": 0.05, "eps": 1.0, "weight_decay": 0.1}),
    "LazyAdam": (nn.LazyAdam, {"learning_rate": 0.05, "eps": 1.0, "weight_decay": 0.1}),
    "AdaMax": (nn.AdaMax, {"learning_rate": 0.05, "eps": 1.0, "weight_decay": 0.1}),
    "Adadelta": (nn.Adadelta, {"learning_rate": 0.5, "epsilon": 0.01, "weight_decay": 0.1}),
    "Adagrad": (nn.Adagrad, {"learning_rate": 0.05, "weight_decay": 0.1}),
    "ProximalAdagrad": (nn.ProximalAdagrad, {"learning_rate": 0.05, "l1": 0.01, "l2": 0.01, "weight_decay": 0.1}),
    "RMSProp": (nn.RMSProp, {"learning_rate": 0.01, "epsilon": 1.0, "momentum": 0.5, "weight_decay": 0.1}),
    "RMSProp, centered": (nn.RMSProp, {"learning_rate": 0.01, "epsilon": 1.0, "momentum": 0.5, "centered": True}),
    "FTRL": (nn.FTRL, {"learning_rate": 0.05, "l1": 0.01, "l2": 0.01, "weight_decay": 0.1}),
    "ASGD": (nn.ASGD, {"learning_rate": 0.01, "t0": 2.0, "weight_decay": 0.1}),
    "Rprop": (nn.Rprop, {"learning_rate": 0.01, "weight_decay": 0.1}),
    "AdaFactor": (nn.AdaFactor, {"weight_decay": 0.1}),
    "AdaFactor, own rate": (nn.AdaFactor, {"learning_rate": 0.05, "relative_step": False, "scale_parameter": False}),
    "user-defined": (UserMomentum, {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "experimental SGD": (experimental.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "experimental Adam": (experimental.Adam, {"lr": 0.05, "eps": 1.0, "weight_decay": 0.1}),
    "experimental AdamW": (experimental.AdamW, {"lr": 0.05, "eps": 1.0, "amsgrad": True}),
    "experimental Adadelta": (experimental.Adadelta, {"lr": 0.5, "eps": 0.01}),
    "experimental Adagrad": (experimental.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    "experimental ASGD": (experimental.ASGD, {"lr": 0.01, "t0": 2.0}),
    "experimental Adamax": (experimental.Adamax, {"lr": 0.05, "eps": 1.0}),
    "experimental RMSprop": (experimental.RMSprop, {"lr": 0.01, "eps": 1.0, "momentum": 0.5}),
    "experimental Rprop": (experimental.Rprop, {"lr": 0.01}),
    "experimental RAdam": (experimental.RAdam, {"lr": 0.01, "eps": 1.0}),
    "experimental NAdam": (experimental.NAdam, {"lr": 0.05, "eps": 1.0}),
    "mint SGD": (mint.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "mint Adam": (mint.optim.Adam, {"lr": 0.05, "eps": 1.0, "weight_decay": 0.1}),
}
