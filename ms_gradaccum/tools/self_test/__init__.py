"""Small trainings with known results, tried on the machine of the user."""
