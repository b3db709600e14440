"""Sessions inside other people's loops, one file for each framework."""
