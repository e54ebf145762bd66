"""Vectorised operators: aggregates and functions of whole Arrow batches."""
