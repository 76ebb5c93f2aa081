"""What TrainingPlan computes."""
