"""Rules of a healthy run: signals of the logged windows, their limits, and what is told."""
