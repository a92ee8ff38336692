"""Every key of a DeepSpeed configuration: one table from which lint, explain, schema and reference are made."""
