"""Live bytes of DeepSpeed's engine: replays what it allocates and frees at each parameter, and adds it to the tape."""
