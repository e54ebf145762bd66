"""The TaskManager: a process that owns key groups, their tables and their log."""
