"""Lints a DeepSpeed configuration: rules, each with the effect at run time and the fix."""
