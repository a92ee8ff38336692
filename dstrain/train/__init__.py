"""The program of every rank: the Hugging Face Trainer, and the tools around its checkpoints."""
