"""The lint rules, one module a topic."""
