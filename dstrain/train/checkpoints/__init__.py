"""Checkpoints and saved models: writing, reading, resuming, exporting."""
