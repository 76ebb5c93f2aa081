"""What `verify` is made of: runs from one start, their comparison, and the search for causes."""
