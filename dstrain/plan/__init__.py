"""What we decide, in pure functions of facts and a request."""
