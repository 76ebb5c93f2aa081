"""Inputs, which are split into micro batches, and losses, which are a sum and a weight."""
