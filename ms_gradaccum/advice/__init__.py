"""Warnings about trainings that differ from the whole batch. Nothing here changes a training."""
