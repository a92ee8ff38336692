"""What every rank does: the Hugging Face Trainer entrypoint and the tools around its checkpoints."""
