"""Turns samples into batches: chat templates, tokens, packing, collation."""
