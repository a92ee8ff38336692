"""How the nodes of a run are kept: an agent on each of them, and the conductor that hears and orders them."""
