"""Pipeline parallelism: a model split into stages that run micro-batches on several ranks."""
