"""Checks a job and the machines before a launch."""
