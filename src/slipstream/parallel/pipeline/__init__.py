"""A model cut into stages that run micro-batches on several ranks. `pipeline` runs them."""
