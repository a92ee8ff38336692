"""Sequences of allocations and frees of a training run, which `reserved` replays on the caching allocator."""
