"""Adapters to MindSpore's compiler, optimizers, devices and CPU kernels."""
