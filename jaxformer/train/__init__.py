"""Training: optimizer, step, loop and log. Inspection during training is added through callbacks."""
