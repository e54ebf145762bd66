"""Calls between workers, TaskManagers and the coordinator: connections, frames and messages."""
