"""Small trainings with known results, run on the user's machine."""
