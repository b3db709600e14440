"""The verbs of a session: what each does and what it refuses."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.errors import SlipstreamError, UsageError
from slipstream.session import checkpoint_format
from tests.harness.ranks import Ranks
from tests.session.training import BATCH, Session, loss_of, opened, small, update


def accumulating() -> Session:
    return opened({"gradients": {"accumulate": 2}})


# Wrong uses.


def after_close(verb: Callable[[Session], object]) -> Callable[[Session], object]:
    def close_then(session: Session) -> object:
        update(session)
        session.close()
        return verb(session)

    return close_then


def enter_no_sync(session: Session) -> None:
    with session.no_sync():
        pass


def between(session: Session) -> None:
    session.backward(loss_of(session))
    session.state_dict()


def step_twice(session: Session) -> None:
    update(session)
    session.step()


def without(state: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**state, **changed}


def load_other_model(session: Session) -> None:
    order = {"names": ["a.weight"], "firings": [1], "sparse_dims": [0]}
    state = {"version": 2, "steps": 3, "split": None, "ready_order": order, "codecs": []}
    session.load_state_dict(state)


MISUSES: dict[str, tuple[Callable[[], Session], Callable[[Session], object], list[str]]] = {
    "step first": (opened, lambda s: s.step(), ["step() without a backward()", "session.backward"]),
    "step twice": (opened, step_twice, ["step() without a backward()", "once each"]),
    "a vector": (opened, lambda s: s.backward(s.model(BATCH)), ["(2, 1)", "loss.mean()"]),
    "nothing": (opened, lambda s: s.backward(loss_of(s)[None][:0]), ["(0,)", "one element"]),
    "a number": (opened, lambda s: s.backward(loss_of(s).item()), ["float", "one element"]),
    "None": (opened, lambda s: s.backward(None), ["NoneType", "one element"]),
    "no loader": (
        opened,
        lambda s: s.loader,
        ["no loader", "accelerate(model, optimizer, loader)"],
    ),
    "backward, closed": (
        opened,
        after_close(lambda s: s.backward(loss_of(s))),
        ["backward() after"],
    ),
    "step, closed": (opened, after_close(lambda s: s.step()), ["step() after close()"]),
    "no_sync, closed": (opened, after_close(enter_no_sync), ["no_sync() after close()"]),
    "state, closed": (
        opened,
        after_close(lambda s: s.state_dict()),
        ["state_dict() after close()"],
    ),
    "load, closed": (
        opened,
        after_close(lambda s: s.load_state_dict({})),
        ["load_state_dict() after close()", "accelerate() again"],
    ),
    "state in a window": (
        accumulating,
        lambda s: (update(s), s.state_dict()),
        ["state_dict() inside an accumulation window", "returned True"],
    ),
    "state before step": (opened, between, ["state_dict() inside"]),
    "another version": (
        opened,
        lambda s: s.load_state_dict(without(s.state_dict(), version=3)),
        ["version 3", "allowed: 2"],
    ),
    "no state": (opened, lambda s: s.load_state_dict({}), ["version None", "allowed: 2"]),
    "none at all": (opened, lambda s: s.load_state_dict(None), ["is a NoneType", "state_dict()"]),
    "a state cut short": (
        opened,
        lambda s: s.load_state_dict({"version": 2}),
        ["lacks", "ready_order", "steps", "state_dict()"],
    ),
    "a state with more": (
        opened,
        lambda s: s.load_state_dict({**s.state_dict(), "epoch": 3}),
        ["has ['epoch']", "allowed: codecs, data, ", "state_dict()", "beside it"],
    ),
    "another model's state": (opened, load_other_model, ["another model's", "a.weight"]),
}


def outcome_of(name: str) -> tuple[str, str]:
    make, misuse, _ = MISUSES[name]
    try:
        with make() as session:
            misuse(session)
    except SlipstreamError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_explained_on_one_process(name: str) -> None:
    kind, text = outcome_of(name)
    assert kind == UsageError.__name__, text
    assert [w for w in MISUSES[name][2] if w not in text] == [], text


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_explained_on_every_rank(two: Ranks, name: str) -> None:
    for kind, text in two.run(outcome_of, name):
        assert kind == UsageError.__name__, text
        assert [w for w in MISUSES[name][2] if w not in text] == [], text


def plain_backward() -> None:
    with opened() as session:
        loss_of(session).backward()


def test_a_backward_past_the_session_is_refused(two: Ranks) -> None:
    for error in two.fail(plain_backward).values():
        assert type(error) is UsageError
        assert "session.backward(loss) instead of loss.backward()" in str(error)


def load_different_states() -> None:
    with opened() as session:
        state = session.state_dict()
        session.load_state_dict(without(state, steps=dist.get_rank()))


def test_ranks_that_load_different_states_are_stopped(two: Ranks) -> None:
    for error in two.fail(load_different_states).values():
        assert "differs from rank 0 in state" in str(error)


# What the verbs do.


def test_one_process_trains_bit_for_bit_as_the_plain_loop() -> None:
    batches = list(torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0)))
    plain = small()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for batch in batches:
        loss = plain(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    seen = []
    with opened(loader=batches) as session:
        for batch in session.loader:
            loss = session.model(batch).square().mean()
            session.backward(loss)
            assert session.step()
            seen.append(loss.item())
    assert seen == expected
    for own, other in zip(session.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)


def window(accumulate: int) -> tuple[list[bool], bool, bool]:
    """Return values of step(); whether gradients are the window's mean; whether they are zeroed."""
    with opened({"gradients": {"accumulate": accumulate}}) as session:
        reference = small()
        rank = dist.get_rank() if dist.is_initialized() else 0
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        for number in range(accumulate * ranks):
            (reference(BATCH * number).square().mean() / (accumulate * ranks)).backward()
        answers = []
        for number in range(accumulate):
            if number:
                answers.append(session.step())
            batch = BATCH * (number * ranks + rank)
            session.backward(session.model(batch).square().mean())
        close = [
            torch.allclose(own.grad, other.grad, atol=1e-6)  # type: ignore[arg-type]
            for own, other in zip(session.model.parameters(), reference.parameters(), strict=True)
        ]
        answers += [session.step(), update(session)]
        while len(answers) < 2 * accumulate:
            answers.append(update(session))
        return answers, all(close), all(p.grad is None for p in session.model.parameters())


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_an_update_sees_the_mean_of_its_window(two: Ranks, accumulate: int) -> None:
    answers = ([False] * (accumulate - 1) + [True]) * 2
    expected = (answers[: max(2, 2 * accumulate)], True, True)
    assert window(accumulate) == expected
    assert two.run(window, accumulate) == [expected] * 2


def test_the_report_says_what_one_process_exchanges() -> None:
    with opened() as session:
        update(session)
        assert "one process" in session.report()
        assert session.segments == ()
    assert "gradients.split" in session.report(full=True)


def reports() -> tuple[str, str]:
    """The report before and after close()."""
    with opened() as session:
        update(session)
        before = session.report()
    return before, session.report()


def test_the_report_stays_the_same_after_close(two: Ranks) -> None:
    for before, after in two.run(reports):
        assert "exchange" in before
        assert after == before


def resumed(num_steps: int) -> bool:
    """Save after some updates and load into a new session; whether the rest is bit-equal."""
    with opened({"gradients": {"split": "per_layer"}}) as straight:
        for _ in range(num_steps):
            update(straight)
        parts: list[Any] = [straight, straight.model, straight.optimizer]
        saved = [through_a_file(part.state_dict()) for part in parts]
        for _ in range(2):
            update(straight)
    with opened({"gradients": {"split": "per_layer"}}) as again:
        parts = [again, again.model, again.optimizer]
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        assert again.segments == (straight.segments if num_steps else ())
        for _ in range(2):
            update(again)
        assert again.state_dict()["steps"] == num_steps + 2
    pairs = zip(straight.model.parameters(), again.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def restored_after_freezing() -> int:
    with opened() as session:
        update(session)
        saved = copy.deepcopy(session.checkpoint())
        next(session.model.parameters()).requires_grad_(False)
        update(session)
        session.restore(saved)
        return session.updates


def test_a_state_from_before_a_parameter_froze_is_restored(two: Ranks) -> None:
    assert two.run(restored_after_freezing) == [1, 1]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_resumed_run_goes_on_bit_for_bit(two: Ranks, num_steps: int) -> None:
    assert resumed(num_steps)
    assert two.run(resumed, num_steps) == [True, True]


def test_a_state_of_the_first_sessions_of_this_version_loads() -> None:
    with opened() as session:
        state = session.state_dict()
        assert state.keys() == checkpoint_format.KEYS | checkpoint_format.LATER
        session.load_state_dict({key: state[key] for key in checkpoint_format.KEYS})


def verbs_after_a_backward_that_failed(folder: str) -> list[str]:
    said = []
    saves = slipstream.Checkpoints(folder)
    with opened() as session:
        update(session)
        saves.save(session, wait=True)
        saved = copy.deepcopy(session.checkpoint())

        def fail(_: torch.Tensor) -> None:
            raise ZeroDivisionError

        hook = next(session.model.parameters()).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            session.backward(loss_of(session))
        hook.remove()
        for verb in (
            session.step,
            session.optimizer.step,
            lambda: session.clip_grad_norm_(1.0),
            session.checkpoint,
            session.state_dict,
            lambda: session.checkpoint(sharded=True),
            lambda: session.restore(saved),
            lambda: session.load_state_dict(saved["session"]),
            lambda: saves.save(session),
            lambda: saves.restore(session),
        ):
            session.optimizer.zero_grad()
            with pytest.raises(SlipstreamError) as caught:
                verb()
            said.append(str(caught.value))
        assert "0.weight" in session.checkpoint("model")["model"]
    return said


def test_after_a_backward_that_failed_verbs_say_to_start_again(two: Ranks, tmp_path: Path) -> None:
    """They said to call backward() first, or flush() after it."""
    for said in two.run(verbs_after_a_backward_that_failed, str(tmp_path), timeout=60):
        for text in said:
            assert "after a backward() that has failed" in text
            assert "start again from the newest checkpoint" in text


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_step_that_is_compiled_as_a_whole_is_refused() -> None:
    """As open_clip's ``--torchcompile-strategy step``: ranks hung in the exchange."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer) as session:

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return session.model(x).square().mean()

        def train_step(x: torch.Tensor) -> None:
            session.backward(loss_of(x))
            session.step()

        with pytest.raises(
            UsageError, match=r"session.backward\(\) inside a function that torch.c"
        ):
            torch.compile(train_step, backend="eager")(torch.ones(3, 2))
        session.backward(torch.compile(loss_of, backend="eager")(torch.ones(3, 2)))
        assert session.step()
