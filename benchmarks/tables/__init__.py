"""How each result is shown: from the values in its file to paragraphs and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.result import Entry, Result
from benchmarks.tables import computing, exchanges, planning, training

TABLES: Mapping[str, Callable[[Entry], Result]] = {
    "adapters": training.adapters,
    "allreduce": exchanges.allreduce,
    "auto": exchanges.auto,
    "balance": training.balance,
    "blame": planning.blame,
    "bubbles": computing.bubbles,
    "checks": training.checks,
    "compiled": computing.compiled,
    "convergence": training.convergence,
    "exchange": exchanges.exchange,
    "faults": planning.faults,
    "network_faults": planning.network_faults,
    "fsdp2": exchanges.fsdp2,
    "fusion": computing.fusion,
    "kills": training.kills,
    "large_batch": training.large_batch,
    "loading": training.loading,
    "local": training.local,
    "local_clock": training.local_clock,
    "unequal": training.unequal,
    "lost_hosts": planning.lost_hosts,
    "memory": exchanges.memory,
    "offload": computing.offload,
    "operators": exchanges.operators,
    "overhead": computing.overhead,
    "precision": training.precision,
    "prediction": planning.prediction,
    "replan": planning.replan,
    "recompute": computing.recompute,
    "scale_out": planning.scale_out,
    "shared_cores": planning.shared_cores,
    "soak": training.soak,
    "tensor_parallel": computing.tensor_parallel,
    "time_to_loss": planning.time_to_loss,
    "times": planning.times,
    "transports": exchanges.transports,
    "tuner": planning.tuner,
    "tutorial": planning.tutorial,
    "wrong_updates": training.wrong_updates,
}
"""By the word that a file of results has for its benchmark."""
