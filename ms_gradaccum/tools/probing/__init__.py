"""Which micro_size fits into a memory limit, measured in child processes."""
