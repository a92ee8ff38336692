"""Tasks whose loss is made of whole answers: their samples, their losses, and the Trainer that asks them."""
