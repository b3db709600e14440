"""The seam between what must be exchanged and how it travels.

Callers say what they need as ``requests``; a ``transport`` carries them out. The ``channel`` keeps
the exchanges of a process in one order on all ranks.
"""
