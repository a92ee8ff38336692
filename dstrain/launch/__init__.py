"""Launches runs: the deepspeed command, its environment, and the processes it starts."""
