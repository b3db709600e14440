"""Predicts the loss of a training at later updates, and the time to a loss, from short runs."""
