"""Facts about a model: its architecture, parameters, files and traces, without loading it."""
