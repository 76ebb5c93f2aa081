"""What MindSpore's compiler, its optimizers and its CPU kernels need to be told."""
