"""Worlds: the parts of the product put together for tests, and samples of what it stores."""
