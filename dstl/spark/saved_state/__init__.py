"""Saved state: read from a checkpoint or savepoint, written as JSON, Parquet or rows of a DataFrame."""
