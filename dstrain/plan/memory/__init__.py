"""Predicts GPU and host memory."""
