"""Reduction of the sums of a window over several processes."""
