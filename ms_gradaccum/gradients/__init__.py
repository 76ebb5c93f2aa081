"""The float32 sums of a window, and the operations on its gradient."""
