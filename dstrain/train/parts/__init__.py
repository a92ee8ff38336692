"""Parts of the Trainer: saving, measuring, the loss, and how ranks share the work."""
