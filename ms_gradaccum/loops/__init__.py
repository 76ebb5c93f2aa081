"""Drivers of windows: Model, hand-written loops, and their data."""
