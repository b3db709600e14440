"""Files that others may have written: read within bounds or refused, and written as a whole.

Knows neither strategies nor traces: each reader says how much it takes, and words the refusal.
"""
