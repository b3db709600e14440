"""What people do in scripts of a framework: functions that run with slipstream, and without.

A module has habits of one framework. A habit takes its side and returns what it noted: losses,
norms, parameters.
"""
