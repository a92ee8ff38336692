"""Published measurements of fine-tuning, asked of the planner: parsed, mapped to configurations, scored."""
