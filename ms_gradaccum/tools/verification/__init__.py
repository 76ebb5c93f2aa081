"""What verify compares."""
