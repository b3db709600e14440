"""Measurements of slipstream beside its rivals: ``python -m benchmarks`` lists and takes them.

A benchmark is a module, ``python -m benchmarks.exchange --help``. It measures, makes plain values
of what it found, and hands these to ``record``; ``tables`` say how they are shown, alike in a
terminal and on the page of results.
"""
