"""The command line: one file a verb; the only importer of Click and the only code that prints."""
