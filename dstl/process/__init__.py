"""Processes of their own: TaskManagers, and the coordinator of files beside the driver's JVM."""
