"""Predicts the time of a step."""
