"""Runs a launch on its nodes: an agent on each of them, and one coordinator."""
