"""Import last in a server of ranks: what is there by then, its forks need not look through again.

A session asks the collector once for all that refers to a class, and tests collect garbage. Among
the million objects of the imports that takes a tenth of a second, longer than a training of a test.
"""

from __future__ import annotations

import gc

gc.freeze()
gc.enable()
