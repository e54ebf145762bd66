"""Tables, their materialization and their recovery."""
