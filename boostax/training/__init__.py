"""Training: the loss contract, the train state and the train step."""
