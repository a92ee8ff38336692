"""The exam of the health rules: recorded runs with a known cause of trouble, and the rules that must name it."""
