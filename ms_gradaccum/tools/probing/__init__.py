"""Search for the micro_size that fits into a memory limit, with measurements in child processes."""
