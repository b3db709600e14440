"""Cells that mean nothing, declared with the reason before any is run."""

from __future__ import annotations

from tests.conformance.habit import Habit
from tests.conformance.sides import UnderDdp
from tests.conformance.techniques import Technique

LACKS = {
    "session": "the hook of DDP has no session: loader, window and end are the script's own",
    "not DDP": "DistributedDataParallel itself is wrong or refuses here, with no hook as well",
    "optimizer's momentum": "DGC adds momentum before it sends, and keeps it to itself: gradients "
    "contain it, and the end of a session ends it (docs/codecs.md)",
    "same batches": "each update's samples are dealt to ranks by their cost: which of them meet in "
    "a batch, and so in a batch norm or a loss that is no mean over samples, is its choice",
    "contiguous": "torch's parameters_to_vector() refuses weights in channels_last, under plain "
    "torch, too",
    "vmap": "torch cannot map over the reference of this kernel either: it reads values",
    "whole batches": "a pipeline computes micro-batches: batch norm takes the statistics of each, "
    "as in the accumulation of gradients (docs/parallel.md)",
    "whole forwards": "a stage of a pipeline computes its own modules alone, once for each "
    "micro-batch, so hooks on modules and parameters are called as often (docs/parallel.md)",
    "all gradients": "a rank has the gradients of its own shards or stages alone; for the norm of "
    "all there is session.clip_grad_norm_() (docs/parallel.md)",
    "whole parameters": "a rank has its shards of split parameters, as tensors of their own shape: "
    "what a script computes of them is of the shards (docs/parallel.md)",
    "one update": "each rank updates on its own gradients, and skips its own updates: what is not "
    "linear in them, and the optimizer's state, differ from rank to rank (docs/local.md)",
    "updates of one pass": "gradients that are zeroed between two passes end an update, after "
    "which ranks may meet: with an even number of updates from meeting to meeting they do not "
    "(docs/local.md)",
    "updates by step()": "an update that no optimizer makes counts as one that this rank has "
    "skipped, and a meeting undoes it; a script that makes all so is refused (docs/local.md)",
    "first rank's buffers": "ranks that meet average the buffers that each has (docs/local.md)",
    "own batches": "ranks that share a model train on the same batches, so none differs",
}


def not_applicable(technique: Technique, habit: Habit) -> str | None:
    """Why a cell means nothing; None: it must end equal or refused."""
    if technique.unavailable is not None:
        return technique.unavailable
    lacking = set()
    if technique.loop is UnderDdp:
        lacking |= {"session", "not DDP"}
    if "dgc" in technique.name:
        lacking.add("optimizer's momentum")
    if technique.name == "kernel sim_ota":
        lacking.add("vmap")
    if "channels_last" in technique.name:
        lacking.add("contiguous")
    if technique.deals:
        lacking.add("same batches")
    if "local" in technique.strategy:
        lacking |= {"updates of one pass", "updates by step()", "first rank's buffers"}
        if technique.bound is not None:
            lacking.add("one update")
    parallel = technique.strategy.get("parallel", {})
    if technique.shares_batches:
        lacking |= {"own batches", "all gradients"}
    if "pipeline" in parallel:
        lacking |= {"whole batches", "whole forwards"}
    if "tensor" in parallel:
        lacking.add("whole parameters")
    for need in sorted(habit.needs & lacking):
        return LACKS[need]
    return None
