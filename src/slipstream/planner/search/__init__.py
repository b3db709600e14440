"""Which strategies are worth comparing, and which of them is best."""
