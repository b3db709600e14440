"""Predict what a strategy costs on this network, and rank the strategies worth a trial."""
