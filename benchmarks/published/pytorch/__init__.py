"""What runs of PyTorch without DeepSpeed allocate: one GPU, DDP and FSDP."""
