"""Where metrics go besides `metrics.jsonl`: SwanLab, TensorBoard and Weights & Biases."""
