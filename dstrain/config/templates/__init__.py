"""Renders Jinja templates to ds_config.json, job.yaml and hostfile."""
