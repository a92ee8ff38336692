"""Live bytes of DeepSpeed's engine: what it allocates and frees at each parameter, replayed, and added to the tape."""
