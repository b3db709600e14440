"""``slipstream tune --to-loss``: calibrate losses by short runs, and choose by the time to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from slipstream.cli.time_to_loss import agreement, doubts, table
from slipstream.cli.tune.display import Display
from slipstream.planner.forecast import Forecast
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.progress.time_to_loss import LossForecast
from slipstream.planner.search.ranking import Prediction
from slipstream.strategy import Strategy
from slipstream.trace import Trace
from slipstream.tuner.to_loss import RUN_UPDATES, LossTuner, TunedToLoss
from slipstream.tuner.trial_log import Trial
from slipstream.tuner.trials import Failure, Measurement, Trials

UNPAIRED = (
    "two runs of the baseline have other losses from the start: the script takes other parameters "
    "or batches in each run, so that small differences drown in noise; fix its seeds"
)


def tune_to_loss(
    trials: Trials,
    base: Strategy,
    loss: float,
    budget: float,
    network: Callable[[], NetworkProfile],
    display: Display,
    *,
    steps: int | None,
    total: int | None,
    hidden: str | None,
    notify: Callable[[Sequence[Trial]], None],
) -> TunedToLoss:
    """Run the script for its losses, with what is shown meanwhile.

    Args:
        trials: runs the script.
        base: the baseline.
        loss: to reach.
        budget: seconds.
        network: measures the network, or reads what it costs.
        display: of the current activity.
        steps: updates of a run; None: `RUN_UPDATES`.
        total: updates of the whole training, if known.
        hidden: why the script may not use the strategy that a trial gives it, if it looks so.
        notify: called with all trials after each new one.

    Raises:
        LaunchError, TraceError, StrategyError: as `LossTuner.tune`.
    """

    def run(strategy: Strategy, limit: float, updates: int, norms: bool) -> Measurement | Failure:
        return replace(trials, steps=updates, skip=0).run(strategy, limit, norms=norms)

    def predict(trace: Trace, base: Strategy) -> Sequence[Prediction]:
        """Strategies that change the mathematics, and ranks that meet rarely."""
        forecast = Forecast.of(trace, network(), base, total)
        found = forecast.lossy()
        rare = forecast.meetings([one for one in found if one.strategy.local is None]).strategy
        return [*found, *(forecast.rank([] if rare is None else [rare]))]

    return LossTuner(
        run=run,
        base=base,
        loss=loss,
        budget=budget,
        predict=predict,
        updates=steps or RUN_UPDATES,
        hidden=hidden,
        notify=notify,
        doing=display.doing,
    ).tune()


def show(tuned: TunedToLoss, console: Console) -> None:
    """Print the predictions, their doubts and the choice."""
    forecast = LossForecast(tuned.calibration)
    console.print(table(tuned.predictions, forecast.base, f"time to a loss of {tuned.loss:g}"))
    for line in agreement(tuned.calibration):
        console.print(Text(line), soft_wrap=True)
    far = doubts(forecast, tuned.predictions, forecast.base)
    for doubt in [*far, *([] if tuned.paired else [UNPAIRED])]:
        console.print(Text(f"warning: {doubt}", style="yellow"), soft_wrap=True)
    console.print(Text(tuned.verdict, style="bold"), soft_wrap=True)
