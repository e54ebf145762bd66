"""Operators: how they are defined and checked, and how their rows are grouped."""
