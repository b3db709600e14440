"""Import first in a server of ranks: until ``frozen`` nothing looks for garbage among what it
imports, which took a quarter of its start."""

from __future__ import annotations

import gc

gc.disable()
