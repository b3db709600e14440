"""Watches a run: hangs, values that are not finite, ranks that drift apart."""
