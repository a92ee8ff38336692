"""How we say it: plans become DeepSpeed JSON, job files and scripts through Jinja templates."""
