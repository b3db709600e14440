"""Keeps ``torch.compile`` out of what wraps the forwards of blocks."""

from __future__ import annotations

from functools import cache


@cache
def leave_to_python() -> None:
    """Let ``torch.compile`` of a model run the functions of this room as they are.

    It would look into them, as into the model's own code, and stumble over their bookkeeping. The
    forward of a block that they call it compiles by itself, unless torch's checkpoint forbids that.
    """
    from torch._dynamo import trace_rules  # here, as torch takes a second to import its compiler

    trace_rules.add("slipstream.memory")
