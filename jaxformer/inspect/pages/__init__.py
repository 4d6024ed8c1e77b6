"""HTML pages about a run, a model and the ladder, each one file that opens without a network."""
