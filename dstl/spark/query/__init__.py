"""The query around the operators: its plan, its start, and batches that must not end without a checkpoint."""
