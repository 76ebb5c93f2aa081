"""The comparisons of verify."""
