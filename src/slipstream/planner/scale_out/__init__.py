"""Predictions for thousands of ranks: from a trace, or from the shape of a transformer."""
