"""Monitoring for operators: an endpoint for Prometheus and a page, from a running driver or the store alone."""
