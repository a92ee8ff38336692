"""Finds the first failure of a run and reports it."""
