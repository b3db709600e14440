"""Tensor parallelism: a plan maps module paths to styles; `split` applies it to a model."""
