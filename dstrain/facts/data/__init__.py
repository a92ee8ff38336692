"""Facts about training data: files, sample formats and columns."""
