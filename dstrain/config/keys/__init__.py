"""Every key of a DeepSpeed configuration in one table, from which lint, explain, schema and reference are made."""
