"""Losses that look at all rows of a batch together, behind the hook of a `WholeBatchLoss`."""
