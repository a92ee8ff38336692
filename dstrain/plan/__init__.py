"""Plans runs, in pure functions of facts and a request."""
