"""The command line: one file per command; the only importer of Click and the only code that prints."""
