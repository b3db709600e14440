"""What one iteration computes and exchanges, and how long that takes under a plan."""
