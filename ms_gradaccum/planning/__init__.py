"""What a training plan is made of: windows, learning rates, checks, text."""
