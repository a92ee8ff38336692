"""Fits the planner's constants to what runs measured."""
