"""How much memory a training takes, measured in a process of its own."""
