"""The tape: Transformers' layer code replayed on byte sizes alone."""
