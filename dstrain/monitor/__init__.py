"""Monitors runs: measures every step and records the metrics."""
