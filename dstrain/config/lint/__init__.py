"""What is wrong with a DeepSpeed configuration: rules, each with what happens at run time and what to write instead."""
