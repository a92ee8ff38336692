"""Monitors runs: the metrics of every step, and where they are kept."""
