"""Measure on live ranks what exchanges and codecs cost, and how compute and exchanges contend."""
