"""The options of ``slipstream plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

TraceFile = Annotated[Path | None, Option(help="Trace of the training: .json or .json.gz.")]
ClusterFile = Annotated[Path | None, Option(help="cluster.yaml of `slipstream doctor network`.")]
Nodes = Annotated[int | None, Option(min=1, help="Predict for this number of hosts.")]
PredictedRanksPerNode = Annotated[
    int | None, Option(min=1, help="Predict for this number of ranks on each.")
]
Rate = Annotated[str | None, Option(help="Predict for links of this rate: 300mbit, 25gbit.")]
RankNumbers = Annotated[
    str | None,
    Option(
        metavar="N..M|N,M,...",
        help="Predict each technique on these numbers of ranks: 64..4096 doubles.",
    ),
]
ShapeFile = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="With --ranks: model, batch, machine and parallel sizes instead of a trace; beside "
        "one, its fabric alone.",
    ),
]
Output = Annotated[
    Path | None, Option("--output", "-o", help="Write the best strategy here: .yaml.")
]
Predicted = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="Write the predicted trace of the best strategy, for `slipstream report`.",
    ),
]
ToLoss = Annotated[
    float | None, Option(help="Rank by the predicted time to this training loss; needs --losses.")
]
ForTime = Annotated[
    str | None,
    Option("--for", help="Rank by the predicted loss after this time, 6h; needs --losses."),
]
Losses = Annotated[
    Path | None,
    Option(help="Losses of short runs: of [bold]slipstream tune --to-loss[/bold]."),
]
MemoryOption = Annotated[
    str | None, Option(help="Memory of a rank's device, 32GiB: find the largest batch instead.")
]
Model = Annotated[str | None, Option(help="With --memory: a known model, or FILE.py:FUNCTION.")]
Length = Annotated[
    int | None, Option(min=1, help="With --memory: tokens of a text, or pixels a side.")
]
Optimizer = Annotated[
    str | None, Option(help="With --memory: adamw (the default), sgd, momentum, lamb.")
]
Dtype = Annotated[
    str | None, Option(help="With --memory: fp32, or the bf16 or fp16 of precision half_weights.")
]
