"""What looks at a training from outside. No other room knows of these."""
