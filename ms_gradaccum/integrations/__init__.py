"""Training steps and trainers of other projects that use this package's accumulation. They are imported on demand."""
