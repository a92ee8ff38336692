"""Job scripts: what a person reads, edits and submits to a scheduler, from the templates in `launch/`."""
