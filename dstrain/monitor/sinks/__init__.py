"""Where metrics go: SwanLab, TensorBoard, Weights & Biases and JSON lines."""
