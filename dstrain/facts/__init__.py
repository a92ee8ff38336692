"""What is true about models, GPUs, hosts and data; only `probe` reads the outside world."""
