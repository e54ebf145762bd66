"""Uploads: hedged PUTs of objects with unique names."""
