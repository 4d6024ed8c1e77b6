"""Training: optimizer, step, loop and log. What to look at on the way comes in as hooks."""
