"""Layers split over ranks: a plan maps paths of modules to styles. `split` applies it."""
