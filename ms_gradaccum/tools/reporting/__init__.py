"""Reports of a training, and their destinations."""
