"""Checks before the first step: what would fail after hours fails in the first minutes."""
