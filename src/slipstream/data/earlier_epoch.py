"""A warning where a resumed run trains an epoch again."""

from __future__ import annotations

from slipstream.errors import warn


def warn_of_an_earlier_epoch(epoch: int | None, saved: int | None) -> None:
    """Warn where a pass begins that the run of a state has had: its script counts epochs by the
    updates, perhaps, of which a loss scale skips some."""
    if epoch is not None and saved is not None and epoch < saved:
        warn(
            f"the state is of epoch {saved}, and the sampler is set to epoch {epoch}, which the "
            "run before this one has had: it is trained again from its begin; let the loop begin "
            f"at epoch {saved}",
        )
