"""The meta-tensor tracer's parts: models without weights, CUDA's choices of kernels, and a count of live storages."""
