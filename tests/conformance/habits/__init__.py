"""The columns: what users do beside a technique, each one function of a `Loop`.

A new habit is one function with ``@habit("its name")`` in the file of its section.
"""
