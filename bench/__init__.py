"""Benchmarks: ``python -m bench NAME --json``; one JSON object on the last line, progress on stderr."""
