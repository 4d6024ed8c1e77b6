"""A run's folder: its config, checkpoints, weights to start from, and classes of the user's own."""
