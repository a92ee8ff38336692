"""The meta-tensor tracer's parts: models without weights, CUDA's kernel choices, and live storages."""
