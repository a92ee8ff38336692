"""How we run it: the deepspeed command, its environment, and the processes it starts."""
