"""Damaged files of every kind: refused with the place, or accepted and of use; never a crash."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from slipstream.strategy import Strategy
from tests.fuzz.damage import ODD, as_json, damaged
from tests.fuzz.kinds import KINDS, Crash, Kind, StrategyFile, refusal
from tests.fuzz.outcome import tried

FILES = {"strategy": 300, "trace": 150, "cluster": 150, "trials": 150, "checkpoint": 300}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return {kind.name: kind(tmp_path_factory.mktemp(kind.name)) for kind in KINDS}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_with_its_place(
    made: dict[str, Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where its code would leave a file

    @settings(
        max_examples=FILES[name],
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.integers(0, 2**64))
    def run(seed: int) -> None:
        outcome, words = tried(made[name], Random(seed), tmp_path)
        assert outcome != "refused without a place", words

    run()


def test_what_is_damaged_was_good(made: dict[str, Kind], tmp_path: Path) -> None:
    for document in StrategyFile.GOOD:
        Strategy.load(document)
    for kind in made.values():
        path = tmp_path / f"good{kind.suffixes[0]}"
        chance = Random(1)
        path.write_bytes(kind.written(chance, kind.document(chance)))
        assert refusal(path, partial(kind.read, path)) is None, kind.name


def test_damage_is_damage() -> None:
    good = {"a": [1, 2.5, {"b": None}], "c": "x"}
    made = [damaged(Random(seed), good) for seed in range(200)]
    assert good == {"a": [1, 2.5, {"b": None}], "c": "x"}
    assert sum(as_json(one) != as_json(good) for one in made) > 180
    assert len(ODD) > 50


def test_a_crash_is_one(tmp_path: Path) -> None:
    """And so is a refusal that does not say where."""

    def crashes() -> None:
        raise KeyError("a")

    with pytest.raises(Crash, match="KeyError: 'a'"):
        refusal(tmp_path, crashes)
    kind = StrategyFile(tmp_path)
    assert not kind.names_the_place(f"{tmp_path}: something is wrong", tmp_path)
    assert not kind.names_the_place("line 1, column 2: something", tmp_path)
    assert kind.names_the_place(f"{tmp_path}: line 1, column 2: something", tmp_path)
