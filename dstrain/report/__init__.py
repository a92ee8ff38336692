"""Reports the outcome of a run: the records of its directory, compared with its plan."""
