"""Checks: each module turns the facts of one subject into findings, and does no I/O."""
