"""The state of a training step, from its tensors and numbers to the folder and back."""
