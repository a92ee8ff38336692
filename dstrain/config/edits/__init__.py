"""Edits made by hand: found, merged on regeneration, and applied to JSON, YAML and hostfiles."""
