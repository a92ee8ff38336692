"""What a training run asks of the caching allocator, in order: `reserved` replays it."""
