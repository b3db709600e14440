"""Find the fastest strategy of a training by measuring it: in trials, or while it runs."""
