"""Probes: each module gathers the facts of one subject, and judges nothing."""
