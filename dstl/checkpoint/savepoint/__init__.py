"""Savepoints: checkpoints copied to where nothing deletes them."""
