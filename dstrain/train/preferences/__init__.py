"""Training on pairs of answers: their tokens, the loss of DPO, its reference, and the Trainer that asks for them."""
