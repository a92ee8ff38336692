"""What looks at a machine: each module gathers the facts of one subject, and judges nothing."""
