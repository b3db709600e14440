"""A training that goes on from a checkpoint is the one that nobody interrupted, bit for bit."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

import slipstream
from slipstream.checkpoint import Checkpoints, read
from slipstream.checkpoint.parts import cut, joined
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import MismatchError, UsageError
from tests.checkpoint.kills import curve, survive
from tests.checkpoint.training import SETTINGS, Net, part
from tests.harness.models import Dealt, Sliced
from tests.harness.ranks import Ranks


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, two: Ranks, tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    whole.mkdir()
    parted.mkdir()
    expected = two.run(part, name, str(whole), 17)
    two.run(part, name, str(parted), 5)  # in the middle of a pass
    found = two.run(part, name, str(parted), 17)  # over the end of one
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for rank in range(2):
        assert curve(str(parted), rank) == curve(str(whole), rank)
        assert len(curve(str(whole), rank)) >= 15  # a flush() has no loss


def test_a_killed_run_goes_on_bit_for_bit(two: Ranks) -> None:
    assert survive(two, "codec, sharded, accumulation, loss scale", 2, seed=1)[0] >= 2


def saved_by(folder: str, strategy: Any) -> Any:
    """Three updates and a checkpoint; the optimizer's state."""
    with opened(strategy) as session:
        saved = Checkpoints(folder)
        start = saved.restore(session)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for update in range(start, start + 3):
                session.backward(session.model(words(update)).square().mean())
                session.step()
            saved.save(session, wait=True)
        assert not caught
        return start, session.checkpoint("model", "optimizer"), session.updates


def opened(strategy: Any, loader: Any = None) -> slipstream.Session[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Net().eval()
    return slipstream.accelerate(model, torch.optim.AdamW(model.parameters()), loader, strategy)


def words(update: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(update)
    return torch.randint(23, (4, 5), generator=seed)


def restored(folder: str, strategy: Any) -> Any:
    with opened(strategy) as session, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = Checkpoints(folder).restore(session)
        return start, session.checkpoint("model", "optimizer"), session.updates


def values(state: Any) -> list[torch.Tensor]:
    moments = [v for s in state["optimizer"]["state"].values() for v in s.values()]
    return [*state["model"].values(), *moments]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [{}, {"gradients": {"transport": "sharded", "codec": "int8"}}])
def test_other_numbers_of_ranks_take_it(strategy: Any, two: Ranks, tmp_path: Path) -> None:
    (start, expected, updates), _ = two.run(saved_by, str(tmp_path), strategy)
    assert (start, updates) == (0, 3)
    with Ranks(3) as three:
        of_three = three.run(restored, str(tmp_path), strategy)
    for start, state, updates in (restored(str(tmp_path), strategy), *of_three):
        assert (start, updates) == (3, 3)
        assert all(map(torch.equal, values(state), values(expected)))


def saved_where_one_skips(folder: str) -> int:
    with opened({"local": {"steps": 4}, "checks": {"nonfinite": "skip"}}) as session:
        saved = Checkpoints(folder)
        for update in range(6):
            loss = session.model(words(update)).square().mean()
            session.backward(loss * (torch.inf if update == 1 and session.rank else 1.0))
            session.step()
            saved.step(session, every=2)
        return session.updates


def test_ranks_save_together_though_one_has_skipped_an_update(two: Ranks, tmp_path: Path) -> None:
    assert two.run(saved_where_one_skips, str(tmp_path)) == [6, 5]
    assert len(Checkpoints(tmp_path).paths) == 3


def drawn(folder: str, strategy: Any, seed: int) -> torch.Tensor:
    """Random numbers after a checkpoint was saved or restored; ``seed`` is that of this run."""
    with opened(strategy) as session:
        saved = Checkpoints(folder)
        torch.manual_seed(seed + session.rank)
        if not saved.restore(session):
            session.backward(session.model(words(0)).square().mean())
            session.step()
            saved.save(session, wait=True)
        return torch.rand(3)


def test_as_many_ranks_on_another_mesh_draw_numbers_of_their_own(
    two: Ranks, tmp_path: Path
) -> None:
    first = two.run(drawn, str(tmp_path), {}, 5)
    again = two.run(drawn, str(tmp_path), {}, 7)
    split = {"tensor": {"ranks": 2, "plan": {"inner": "column", "outer": "row"}}}
    other = two.run(drawn, str(tmp_path), {"parallel": split}, 7)
    for rank in range(2):
        own = torch.rand(3, generator=torch.Generator().manual_seed(7 + rank))
        assert torch.equal(again[rank], first[rank])
        assert torch.equal(other[rank], own)


def test_also_states_and_random_numbers_are_kept_and_read_as_data(tmp_path: Path) -> None:
    class Counter:
        epochs = 7

        def state_dict(self) -> dict[str, int]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.epochs = state["epochs"]

    counter = Counter()
    with opened({}) as session:
        saved = Checkpoints(tmp_path, also={"counter": counter})
        saved.save(session)
        expected = torch.rand(3)
    counter.epochs = 0
    with opened({}) as session:
        Checkpoints(tmp_path, also={"counter": counter}).restore(session)
        assert torch.equal(torch.rand(3), expected)
        assert counter.epochs == 7
        state = read(saved.paths[-1])[0]
        assert torch.equal(state["model"]["inner.weight"], session.model.inner.weight)
    with opened({}) as session:
        saved = Checkpoints(tmp_path, also={"another": counter})
        with pytest.warns(UserWarning, match="no state of another"):
            saved.restore(session)
        counter.state_dict = lambda: {"epochs": counter}  # type: ignore[method-assign,dict-item]
        with pytest.raises(UsageError, match=r"\['another'\]\['epochs'\].*Counter.* is no data"):
            saved.save(session)


def warmed_up(folder: str, updates: int, parted: int) -> list[float]:
    """The learning rates of a run that is resumed after some updates."""
    rates: list[float] = []
    for end in (parted, updates):
        with opened({}) as session:
            warmup = LinearLR(session.optimizer, total_iters=4)
            drops = MultiStepLR(session.optimizer, [2])
            schedule = SequentialLR(session.optimizer, [warmup, drops], [4])
            saved = Checkpoints(folder, also={"schedule": schedule})
            for update in range(saved.restore(session), end):
                session.backward(session.model(words(update)).square().mean())
                session.step()
                schedule.step()
                rates += schedule.get_last_lr()
                saved.step(session, every=1)
    return rates


def test_a_schedule_goes_on_over_the_end_of_its_warm_up(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert warmed_up(str(parted), 8, 2) == warmed_up(str(whole), 8, 8)


def test_kinds_of_dicts_that_are_data_are_kept() -> None:
    state = {"also": {"ordered": OrderedDict(a=[Counter(b=2)]), "large": OrderedDict(t=LARGE)}}
    found = joined(cut(state, 0), 0)["also"]
    assert [type(one) for one in found.values()] == [OrderedDict, OrderedDict]
    assert found["ordered"]["a"][0] == Counter(b=2)
    assert found["ordered"]["a"][0]["another"] == 0
    assert torch.equal(found["large"]["t"], LARGE)


LARGE = torch.ones(2000)


def seen(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_the_order_of_a_sampler_within_that_of_batches_is_drawn_again(tmp_path: Path) -> None:
    def loader(seed: int) -> DataLoader[int]:
        rows: Any = range(12)
        order = RandomSampler(rows, generator=torch.Generator().manual_seed(seed))
        return DataLoader(rows, batch_sampler=BatchSampler(order, 2, drop_last=False))

    with opened({}, loader(5)) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        seen(islice(passed, 2))
        saved.save(session, wait=True)
        rest = seen(passed)
    with opened({}, loader(6)) as session:  # saved again before its first batch
        saved = Checkpoints(tmp_path)
        saved.restore(session)
        saved.save(session, wait=True)
        assert seen(session.loader) == rest
    with opened({}, loader(7)) as session:
        Checkpoints(tmp_path).restore(session)
        assert seen(session.loader) == rest


def test_a_generator_of_the_loader_goes_on_between_two_passes(tmp_path: Path) -> None:
    rows: Any = range(12)

    def loader() -> DataLoader[int]:
        return DataLoader(rows, 2, shuffle=True, generator=torch.Generator().manual_seed(5))

    with opened({}, loader()) as session:
        saved, first = Checkpoints(tmp_path), seen(session.loader)
        saved.save(session, wait=True)
        second = seen(session.loader)
        assert first != second
    with opened({}, loader()) as session:
        Checkpoints(tmp_path).restore(session)
        assert seen(session.loader) == second


class OwnSampler(DistributedSampler[int]):
    """Whose length is a hint alone."""


def epochs_seen(
    folder: Path,
    stop: int,
    prefetch: bool,
    kind: type[DistributedSampler[int]] = DistributedSampler,
    limit: int = 5,
) -> list[tuple[int, list[int]]]:
    """Epochs of so many batches in the loop of docs/checkpoints.md, until so many updates are
    done."""
    rows: Any = range(10)
    loader = DataLoader(rows, 2, sampler=kind(rows, 1, 0))
    found: list[tuple[int, list[int]]] = []
    strategy = {"data": {"prefetch": {"threads": True, "workers": 1}}} if prefetch else {}
    with opened(strategy, loader) as session:
        saved = Checkpoints(folder)
        saved.restore(session)
        for epoch in range(session.updates // limit, 4):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for batch in session.loader:
                found.append((epoch, batch.tolist()))
                session.backward(session.model(words(session.updates)).square().mean())
                session.step()
                saved.step(session, every=stop)
                if session.updates == stop:
                    return found
                if limit < 5 and session.updates == (epoch + 1) * limit:
                    break
    return found


@pytest.mark.parametrize(
    ("prefetch", "kind"),
    [(False, DistributedSampler), (True, DistributedSampler), (False, OwnSampler)],
)
def test_a_run_that_ended_with_an_epoch_goes_on_with_the_next(
    prefetch: bool, kind: type[DistributedSampler[int]], tmp_path: Path
) -> None:
    whole = epochs_seen(tmp_path / "whole", 20, prefetch, kind)
    for stop in (5, 7, 10):
        seen_until = epochs_seen(tmp_path / str(stop), stop, prefetch, kind)
        assert seen_until + epochs_seen(tmp_path / str(stop), 20, prefetch, kind) == whole


@pytest.mark.parametrize("kind", [DistributedSampler, OwnSampler])
def test_a_run_that_leaves_its_passes_early_goes_on_with_the_next(
    kind: type[DistributedSampler[int]], tmp_path: Path
) -> None:
    whole = epochs_seen(tmp_path / "whole", 12, False, kind, 3)
    for stop in (3, 4, 6):
        seen_until = epochs_seen(tmp_path / str(stop), stop, False, kind, 3)
        assert seen_until + epochs_seen(tmp_path / str(stop), 12, False, kind, 3) == whole


def test_the_end_of_an_epoch_is_kept_until_a_pass_begins(tmp_path: Path) -> None:
    epochs_seen(tmp_path, 5, False)
    rows: Any = range(10)
    loader = DataLoader(rows, 2, sampler=DistributedSampler(rows, 1, 0))
    for _ in range(2):
        with opened({}, loader) as session:
            saved = Checkpoints(tmp_path)
            saved.restore(session)
            saved.save(session)
            assert seen(session.loader) == []  # still of that epoch: none is left
            assert len(seen(session.loader)) == 5


def test_a_loop_that_goes_on_after_a_restore_leaves_the_next_one_whole(tmp_path: Path) -> None:
    rows: Any = range(12)
    with opened({}, DataLoader(rows, 2, shuffle=True)) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        first = seen(islice(passed, 2))
        saved.save(session, wait=True)
        first += seen(islice(passed, 1))
        saved.restore(session)
        assert session.state_dict()["data"]["batches"] == 2
        first += seen(passed)
        assert sorted(chain(*first)) == [*rows]
        saved.restore(session)
        again = seen(session.loader)
        assert again == first[2:]
        assert sorted(chain(*seen(session.loader))) == [*rows]


def test_a_loop_within_a_loop_does_not_move_the_place(tmp_path: Path) -> None:
    rows: Any = range(12)
    with opened({}, DataLoader(rows, 2, shuffle=True)) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        seen(islice(passed, 2))
        seen(islice(session.loader, 3))  # as who evaluates on batches of the training
        seen(islice(passed, 1))
        saved.save(session, wait=True)
        rest = seen(passed)
    with opened({}, DataLoader(rows, 2, shuffle=True)) as session:
        Checkpoints(tmp_path).restore(session)
        assert seen(session.loader) == rest


class Damaged:
    """Samples, one of which cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("damaged")
        return index


def test_errors_that_a_run_has_caught_do_not_end_the_one_that_goes_on(tmp_path: Path) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Damaged(), 1)  # type: ignore[arg-type]

    with opened({}, loader()) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        seen(islice(passed, 2))
        with pytest.raises(ValueError, match="damaged"):
            next(passed)
        seen(islice(passed, 1))
        saved.save(session, wait=True)
    with opened({}, loader()) as session:
        Checkpoints(tmp_path).restore(session)
        with pytest.warns(UserWarning, match="among the 3 batches .* one raises ValueError"):
            assert seen(session.loader) == [[4], [5], [6], [7]]


def test_an_error_that_ends_the_loader_is_raised_where_batches_are_skipped(tmp_path: Path) -> None:
    fails = False

    class Stream:
        def __iter__(self) -> Iterator[int]:
            for number in range(8):
                if fails and number == 1:
                    raise OSError("cannot be read now")
                yield number

    with opened({}, Stream()) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        assert [*islice(passed, 3)] == [0, 1, 2]
        saved.save(session, wait=True)
    with opened({}, Stream()) as session:
        Checkpoints(tmp_path).restore(session)
        fails = True
        with (
            pytest.warns(UserWarning, match="among the 3 batches"),
            pytest.raises(OSError, match="cannot be read now"),
        ):
            next(iter(session.loader))
        fails = False
        assert [*session.loader] == [3, 4, 5, 6, 7]


class OwnPlace:
    """Batches of this rank, and a state that is its own."""

    def __init__(self, rank: int) -> None:
        self.state = {"name": f"file {rank}", "next": 0}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        while self.state["next"] < 6:  # type: ignore[operator]
            self.state["next"] += 1  # type: ignore[operator]
            yield self.state["name"], self.state["next"]  # type: ignore[misc]
        self.state["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def of_own_places(folder: str, count: int) -> tuple[list[Any], list[str]]:
    """The batches of a pass up to a checkpoint, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opened({}, OwnPlace(slipstream.data_share()[0])) as session:
            saved = Checkpoints(folder)
            saved.restore(session)
            found = list(islice(session.loader, count))
            saved.save(session, wait=True)
        return found, [str(one.message) for one in caught]


def test_a_loader_with_a_state_goes_on_with_that_of_its_rank(two: Ranks, tmp_path: Path) -> None:
    for first in (1, 3):
        runs = two.run(of_own_places, str(tmp_path), 2)
        for rank, (found, said) in enumerate(runs):
            assert found == [(f"file {rank}", first), (f"file {rank}", first + 1)]
            assert not said
    found, (said,) = of_own_places(str(tmp_path), 1)
    assert found == [("file 0", 5)]
    assert "each goes on with that of rank 0" in said


def fails_to_save(folder: str) -> None:
    """A state of the last rank cannot be had."""

    class Counter:
        def state_dict(self) -> dict[str, Any]:
            if session.rank:
                raise ZeroDivisionError
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    strategy = {"gradients": {"codec": "onebit"}, "checks": {"timeout": 20}}
    with opened(strategy) as session:
        session.backward(session.model(words(0)).square().mean())
        session.step()
        Checkpoints(folder, also={"counter": Counter()}).save(session)


def test_a_state_that_fails_on_one_rank_fails_on_all(two: Ranks, tmp_path: Path) -> None:
    errors = two.fail(fails_to_save, str(tmp_path))
    assert isinstance(errors[1], ZeroDivisionError)
    assert isinstance(errors[0], MismatchError)


def test_the_default_device_of_a_script_is_none_of_a_checkpoint(tmp_path: Path) -> None:
    with opened({}) as session:
        saved = Checkpoints(tmp_path)
        with torch.device("meta"):
            saved.save(session, wait=True)
            state = read(saved.paths[-1])[0]
            assert saved.restore(session) == 0
        assert torch.equal(state["model"]["inner.weight"], session.model.inner.weight)
        assert not (tmp_path / "broken-update-00000000").exists()


def test_a_script_may_change_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened({}) as session:
        saved = Checkpoints("runs")
        (tmp_path / "other").mkdir()
        monkeypatch.chdir("other")
        saved.save(session, wait=True)
    assert saved.paths == [tmp_path / "runs" / "update-00000000"]


def test_a_pass_of_an_older_checkpoint_is_drawn_again(tmp_path: Path) -> None:
    """It has the numbers of torch alone."""
    rows: Any = range(12)
    with opened({}, DataLoader(rows, batch_size=2, shuffle=True)) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        seen(islice(passed, 2))
        begun = session.loader.drawn_with
        assert begun is not None
        older = [begun["default"]["torch"], *begun["loader"]]
        with patch.object(UnevenInputLoader, "drawn_with", older):
            saved.save(session, wait=True)
        rest = seen(passed)
    with opened({}, DataLoader(rows, batch_size=2, shuffle=True)) as session:
        Checkpoints(tmp_path).restore(session)
        assert seen(session.loader) == rest


def test_a_pass_that_is_over_is_not_drawn_again_whoever_has_its_iterator(tmp_path: Path) -> None:
    rows: Any = range(12)
    with opened({}, DataLoader(rows, batch_size=2, shuffle=True)) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        first = seen(passed)
        saved.save(session, wait=True)
        second = seen(session.loader)
        assert first != second
        assert next(passed, None) is None
    with opened({}, DataLoader(rows, batch_size=2, shuffle=True)) as session:
        Checkpoints(tmp_path).restore(session)
        assert seen(session.loader) == second


def test_a_folder_of_another_run_is_not_written(tmp_path: Path) -> None:
    with opened({}) as session:
        saved = Checkpoints(tmp_path)
        saved.save(session)
        with opened({}) as other, pytest.raises(UsageError, match="of another session"):
            saved.save(other)
    with opened({}) as session, pytest.raises(UsageError, match=r"call restore\(session\) before"):
        Checkpoints(tmp_path).save(session)
    with pytest.raises(UsageError, match="keep=0: must be at least 1"):
        Checkpoints(tmp_path, keep=0)
    with opened({}) as session, pytest.raises(UsageError, match="every=0"):
        Checkpoints(tmp_path).step(session, every=0)


def test_training_goes_on_while_the_copy_is_written(tmp_path: Path) -> None:
    """Changes after `save` are not in it."""
    with opened({}) as session:
        before = session.model.inner.weight.detach().clone()
        saved = Checkpoints(tmp_path)
        saved.save(session)
        with torch.no_grad():
            session.model.inner.weight.fill_(5)
    assert torch.equal(read(saved.paths[-1])[0]["model"]["inner.weight"], before)


def dealt_out(kind: type[Dealt | Sliced], folder: str, own: bool, stop: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = Net().eval()
    optimizer = kind(model.parameters())
    also = {"optimizer": optimizer} if own else {"schedule": LinearLR(optimizer)}
    with slipstream.accelerate(model, optimizer) as session:
        saved = Checkpoints(folder, also=also)
        for update in range(saved.restore(session), stop):
            batch = words(2 * update + session.rank)
            session.backward(session.model(batch).square().mean())
            session.step()
        saved.save(session, wait=True)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", [Dealt, Sliced])
def test_an_optimizer_that_deals_its_work_out_is_saved_by_each_rank(
    two: Ranks, kind: type[Dealt | Sliced], tmp_path: Path
) -> None:
    expected = two.run(dealt_out, kind, str(tmp_path / "whole"), True, 5)
    two.run(dealt_out, kind, str(tmp_path / "parted"), True, 2)
    for found in two.run(dealt_out, kind, str(tmp_path / "parted"), True, 5):
        assert all(map(torch.equal, found, expected[0]))
    for error in two.fail(dealt_out, kind, str(tmp_path / "refused"), False, 2).values():
        assert isinstance(error, UsageError)
        assert "also={'optimizer': optimizer}" in str(error)


def rounds_in_another_way(folder: str) -> None:
    """As a processor of another kind does; of most parameters the state is rows and columns."""
    torch.manual_seed(3)
    model = Net().eval()
    optimizer = torch.optim.Adafactor(model.parameters())
    with slipstream.accelerate(model, optimizer) as session:
        session.backward(session.model(words(session.rank)).square().mean())
        session.step()
        rows = [one["row_var"] for one in optimizer.state.values() if "row_var" in one]
        assert rows
        for row in rows:
            row *= 1 + 1e-6 * session.rank
        Checkpoints(folder).save(session, wait=True)


class Packed(torch.optim.SGD):
    """Keeps momenta in 8 bits, in rows of another length, as optimizers with scaled blocks do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            rows = torch.zeros(-(-p.numel() // 16), 16, device=p.device)
            self.state[p]["momentum"] = rows.to(torch.float8_e4m3fn)


def saved_in_8_bits(folder: str) -> None:
    model = Net().eval()
    with slipstream.accelerate(model, Packed(model.parameters(), lr=0.1)) as session:
        session.backward(session.model(words(session.rank)).square().mean())
        session.step()
        Checkpoints(folder).save(session, wait=True)


def test_a_state_in_8_bits_is_saved(two: Ranks, tmp_path: Path) -> None:
    two.run(saved_in_8_bits, str(tmp_path))


def test_a_factored_state_that_ranks_round_in_other_ways_is_saved(
    two: Ranks, tmp_path: Path
) -> None:
    """It was taken for that of an optimizer that deals its work out."""
    two.run(rounds_in_another_way, str(tmp_path))


def trained_on(folder: Path, stop: int, look: str) -> list[list[int]]:
    """The batches that a script trains on which looks at the first one of other passes, too."""
    found: list[list[int]] = []
    rows: Any = range(12)
    with opened({}, DataLoader(rows, 2, shuffle=True)) as session:
        saved = Checkpoints(folder)
        saved.restore(session)
        while session.updates < 15:
            if look == "before a pass":
                len(next(iter(session.loader)))
            for batch in session.loader:
                if look == "before backward":
                    next(iter(session.loader))
                session.backward(session.model(words(session.updates)).square().mean())
                session.step()
                found.append(batch.tolist())
                if session.updates in (4, 5):
                    if look == "within it":
                        next(iter(session.loader))
                    elif look == "at all of one":
                        seen(session.loader)
                    saved.save(session, wait=True)
                if session.updates == stop:
                    return found
    return found


@pytest.mark.parametrize("look", ["before a pass", "before backward", "within it", "at all of one"])
def test_a_look_at_batches_does_not_move_the_place(look: str, tmp_path: Path) -> None:
    whole = trained_on(tmp_path / "whole", 99, look)
    parts = [trained_on(tmp_path / "parted", stop, look) for stop in (4, 5, 99)]
    found = [batch for part in parts for batch in part]
    # a look draws an order, but for that of a pass that goes on: later epochs have others
    alike = 6 if look == "before backward" else len(whole)
    assert found[:alike] == whole[:alike]
    assert len(found) == len(whole)


def test_an_iterator_that_is_kept_is_not_where_a_run_goes_on() -> None:
    rows: Any = range(12)
    with opened({}, DataLoader(rows, 2)) as session:
        kept = iter(session.loader)
        next(kept)
        for _ in session.loader:
            session.backward(session.model(words(session.updates)).square().mean())
            session.step()
        assert session.state_dict()["data"]["batches"] == 0


def test_a_look_at_a_loader_that_keeps_its_place_does_not_move_it(tmp_path: Path) -> None:
    of_own_places(str(tmp_path), 2)
    with opened({}, OwnPlace(0)) as session:
        Checkpoints(tmp_path).restore(session)
        assert next(iter(session.loader)) == ("file 0", 3)
        assert next(iter(session.loader)) == ("file 0", 3)


def test_a_pass_with_gradients_of_the_script_is_none_that_was_looked_at(tmp_path: Path) -> None:
    rows: Any = range(12)
    with opened({}, DataLoader(rows, 2)) as session:
        saved, passed = Checkpoints(tmp_path), iter(session.loader)
        seen(islice(passed, 2))
        saved.save(session, wait=True)
    with opened({}, DataLoader(rows, 2)) as session:
        Checkpoints(tmp_path).restore(session)
        assert next(iter(session.loader)).tolist() == [4, 5]
        for parameter in session.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        session.optimizer.step()
        assert next(iter(session.loader)).tolist() == [0, 1]
