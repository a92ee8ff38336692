"""What judges a machine: each module turns the facts of one subject into findings, and looks at nothing."""
