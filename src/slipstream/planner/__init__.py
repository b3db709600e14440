"""Ask before running: what a strategy would cost here, and which one is worth a trial."""
