"""The verbs: `dstrain <verb>` is the module of that name, which parses, calls and prints."""
