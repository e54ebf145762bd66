"""Checkpoints: coordinator, manifest log, savepoints, cleaner."""
