"""Who drives batches into windows: Model, loops that users write, their data."""
