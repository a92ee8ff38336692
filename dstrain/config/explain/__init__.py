"""Explains a key or a whole ds_config.json."""
