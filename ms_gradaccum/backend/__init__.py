"""Adapters to MindSpore's compiler, optimizers and devices."""
