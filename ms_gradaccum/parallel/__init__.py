"""What several processes do to the sums of a window."""
