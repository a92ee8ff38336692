"""Runs a launch: start, supervision, restarts, state, stop and detach."""
