"""Tools that inspect a training from outside. Nothing else in the package imports them."""
