"""What we watch: metrics of every step and where they are kept."""
