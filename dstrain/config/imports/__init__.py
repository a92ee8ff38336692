"""Reads the training files of other tools: each tool is a table of its keys, walked by the same code."""
