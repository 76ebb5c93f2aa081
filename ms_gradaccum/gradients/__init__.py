"""The float32 sums of a window, and what is done to a gradient."""
