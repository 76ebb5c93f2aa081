"""Planning of a training: TrainingPlan and its computations."""
