"""All that a training needs to go on, as files."""
