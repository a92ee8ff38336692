"""What a machine is asked before it trains: facts are gathered all at once (`looks`), and judged (`checks`)."""
