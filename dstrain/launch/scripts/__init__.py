"""Job scripts that a person reads, edits and submits to a scheduler, from the templates in `launch/`."""
