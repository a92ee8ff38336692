"""Copies files between hosts without a shared file system."""
