"""Tables and their recovery: what the log protects."""
