"""The manifest log: the one place where checkpoints are committed, and its readers."""
