"""Facts about models, GPUs, hosts and data; only `probe` and its helpers read the outside world."""
