"""What a saved state is made of: files, random states, places in the data, numbers of objects."""
