"""Checks machines before training: probes gather facts in parallel, checks judge them."""
