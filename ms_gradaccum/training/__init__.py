"""Forward, backward and add; the order of an update; the training step that users build."""
