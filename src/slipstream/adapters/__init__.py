"""Sessions inside other people's loops, and the exchange of FSDP2: a file for each framework."""
