"""What each world does to the sums of a window: one process, data parallel, HSDP, the compiler's own."""
