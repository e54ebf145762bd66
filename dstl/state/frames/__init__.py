"""Rows and pandas frames to Arrow columns and back."""
