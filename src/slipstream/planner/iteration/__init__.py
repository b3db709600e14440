"""One iteration: what it computes and exchanges, and how long that takes under a plan."""
