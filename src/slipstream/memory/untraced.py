"""Keeps ``torch.compile`` out of what wraps the forwards of blocks."""

from __future__ import annotations

from contextlib import suppress
from functools import cache


@cache
def leave_to_python() -> None:
    """Let ``torch.compile`` run the functions of this package as they are, from now on.

    It would look into them, as into the model's own code, and stumble over their bookkeeping. A
    block's own forward, which they call, is compiled by itself, unless torch's checkpoint forbids
    that. Where torch has moved its list of such folders, a compiled model fails as it did without.
    """
    with suppress(ImportError, AttributeError):
        # here, as torch takes a second to import its compiler
        from torch._dynamo import trace_rules

        trace_rules.add("slipstream.memory")
