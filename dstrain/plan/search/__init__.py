"""Searches for the fastest configuration that fits."""
