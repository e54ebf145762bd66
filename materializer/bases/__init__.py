"""Bases: stored snapshots of tables, written, cached and loaded."""
