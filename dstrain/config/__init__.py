"""DeepSpeed configurations and job files: rendered from plans, read, linted, explained, and edited."""
