"""How the nodes of a run are kept: an agent on each of them, and the coordinator that hears and orders them."""
