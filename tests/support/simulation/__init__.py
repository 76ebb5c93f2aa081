"""Compilation of a step for several devices on a machine without them."""
