"""What became of a run: what its directory recorded, compared with its plan."""
