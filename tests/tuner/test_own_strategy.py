"""A script that gives accelerate() a strategy of its own is told so, with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import TraceError
from slipstream.strategy import Strategy
from slipstream.tuner.own_strategy import PLACES, own_strategy
from slipstream.tuner.trials import Failure, Measurement
from slipstream.tuner.tune import Tuner

OWN = {
    "by name": "session = slipstream.accelerate(model, opt, loader, strategy={'data': {}})",
    "by place": "session = accelerate(model, opt, loader, 'exact')",
    "a variable": "s = 'exact'\nslipstream.accelerate(model, opt, strategy=s)",
    "a setting": "accelerate(model, opt, strategy=os.environ.get('S'))",
    "a path": "accelerate(model, opt, strategy=Path('a') / 'b.yaml')",
    "FSDP2": "accelerate_fsdp(model, opt, 'exact')",
    "Lightning": "Trainer(strategy=SessionStrategy({'local': 'auto'}))",
    "Fabric": "Fabric(strategy=FabricStrategy('exact'))",
    "Accelerate": "Accelerator(cpu=True, strategy='exact')",
    "Trainer": "SessionTrainer(model=model, strategy='exact')",
}
OPEN = {
    "none": "slipstream.accelerate(model, opt, loader)",
    "said to be none": "slipstream.accelerate(model, opt, loader, strategy=None)",
    "of another function": "search(model, strategy='greedy')",
    "an adapter without one": "Trainer(strategy=SessionStrategy(timeout=hour))",
    "another argument": "SessionTrainer(model, arguments, collator, data)",
    "not Python": "def",
}


@pytest.mark.parametrize("text", OWN.values(), ids=OWN)
def test_the_line_is_named(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import slipstream\n{text}\n")
    line = 1 + len(text.splitlines())
    told = own_strategy(script)
    assert told is not None
    (name,) = (n for n in PLACES if f"{n}(" in text)
    assert told.startswith(f"train.py:{line} gives {name}() a strategy of its own")
    assert (", unless it is None," in told) == (text in (OWN["a variable"], OWN["a setting"]))


@pytest.mark.parametrize("text", OPEN.values(), ids=OPEN)
def test_other_scripts_are_fine(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert own_strategy(script) is None
    assert own_strategy(tmp_path / "missing.py") is None


@pytest.mark.parametrize("status", ["no trace", "hanging"])
def test_tune_says_so_where_the_baseline_leaves_no_trace(status: str) -> None:
    def run(strategy: Strategy, limit: float) -> Measurement | Failure:
        return Failure(status, "it ended without a trace")  # type: ignore[arg-type]

    tuner = Tuner(run, Strategy(), 100.0, hidden="train.py:3 gives its own")
    with pytest.raises(TraceError, match=r"ended without a trace; train\.py:3 gives its own"):
        tuner.tune()
