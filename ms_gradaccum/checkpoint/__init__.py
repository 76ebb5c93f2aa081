"""Saving and loading everything that a training needs to continue."""
