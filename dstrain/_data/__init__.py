"""Text files that ship with dstrain; in a checkout they are top-level folders."""
