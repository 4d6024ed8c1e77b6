"""From text on disk to batches of token windows: numpy, tokenizers and grain."""
