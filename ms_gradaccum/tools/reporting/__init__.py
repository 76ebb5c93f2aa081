"""Reports of a training, and where they are written."""
