"""Codecs: keys and values to bytes and back, one by one and by columns."""
