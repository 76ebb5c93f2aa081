"""What find_micro_size tries."""
