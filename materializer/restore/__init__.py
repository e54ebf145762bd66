"""Restores: tables from bases and the log behind them."""
