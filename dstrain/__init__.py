"""Decide, explain, check, launch and watch DeepSpeed fine-tuning of large models."""

__version__ = "0.1.0"
