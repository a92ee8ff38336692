"""Checks before the first step: faults that would show after hours show in the first minutes."""
