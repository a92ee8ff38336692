"""What every rank runs: the Hugging Face Trainer entrypoint and the tools around its checkpoints."""
