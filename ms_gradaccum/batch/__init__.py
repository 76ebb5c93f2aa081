"""How inputs are cut into micro batches, and what a loss is: a sum and a weight."""
