"""Datasets: from files to batches, with numpy, tokenizers and grain."""
