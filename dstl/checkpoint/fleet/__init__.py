"""The TaskManagers of a run: their number, places, restores and calls."""
