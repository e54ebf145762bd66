"""The driver around the query: its session, its TaskManagers, its savepoints."""
