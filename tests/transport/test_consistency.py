"""All ranks go on, or none does: and each says why."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from slipstream.errors import MismatchError, ModelError, StrategyError
from slipstream.transport import consistency
from slipstream.transport.consistency import agree
from tests.harness.ranks import PerRank, Ranks


def compare(facts: dict[str, str], error: Exception | None = None) -> str:
    agree(facts, dist.group.WORLD, error)
    return "went on"


SAME = {"the strategy": "{}", "parameter a": "float32 (2,)", "parameter b": "float32 (3,)"}


@pytest.mark.parametrize("facts", [SAME, {}, {"a": ""}, {"ä there, on rank 0;": "\n"}])
def test_ranks_with_the_same_facts_go_on(three: Ranks, facts: dict[str, str]) -> None:
    assert three.run(compare, facts) == ["went on"] * 3


def reordered(facts: dict[str, str]) -> dict[str, str]:
    return dict(reversed(facts.items()))


def without(facts: dict[str, str], name: str) -> dict[str, str]:
    return {n: v for n, v in facts.items() if n != name}


OTHER_VALUE = SAME | {"parameter b": "float16 (3,)"}
DIFFERENCES = {
    "a value on the last rank": (
        (SAME, SAME, OTHER_VALUE),
        [
            "rank 2 differs from rank 0 in parameter b: float16 (3,) on rank 2",
            "float32 (3,) on rank 0; every rank must build the same",
        ],
        ["rank 1"],
    ),
    "a value on the first rank: all others differ": (
        (OTHER_VALUE, SAME, SAME),
        ["rank 1 differs from rank 0 in parameter b", "rank 2 differs", "float16 (3,) on rank 0"],
        [],
    ),
    "every rank has another value": (
        ({"a": "1"}, {"a": "2"}, {"a": "3"}),
        ["2 on rank 1, 1 on rank 0", "3 on rank 2, 1 on rank 0"],
        [],
    ),
    "a fact that one rank lacks": (
        (SAME, without(SAME, "parameter a"), SAME),
        ["rank 1", "parameter a: absent on rank 1, float32 (2,) on rank 0"],
        ["rank 2"],
    ),
    "a fact that one rank has alone": (
        (SAME, SAME | {"parameter c": "int"}, SAME),
        ["parameter c: int on rank 1, absent on rank 0"],
        ["rank 2"],
    ),
    "no facts at all on one": (({}, SAME, {}), ["rank 1", "absent on rank 0"], ["rank 2"]),
    "the same in another order": (
        (SAME, SAME, reordered(SAME)),
        ["rank 2 has the same as rank 0 in another order"],
        ["rank 1"],
    ),
    "a value that reads like the sentence": (
        ({"a": "here there, on"}, {"a": "x there, y"}, {"a": "here there, on"}),
        ["x there, y on rank 1, here there, on on rank 0"],
        ["rank 2"],
    ),
}


@pytest.mark.parametrize(("facts", "said", "unsaid"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_difference_stops_every_rank_with_the_same_words(
    three: Ranks, facts: tuple[dict[str, str], ...], said: list[str], unsaid: list[str]
) -> None:
    errors = three.fail(compare, PerRank(*facts))
    assert {type(e) for e in errors.values()} == {MismatchError}
    texts = {str(e) for e in errors.values()}
    assert len(texts) == 1
    text = texts.pop()
    assert [words for words in said if words not in text] == [], text
    assert [words for words in unsaid if words in text] == [], text


BROKEN = ModelError("no parameter 'x'")
ALSO = StrategyError("no preset is named 'fats'")
FAILURES = {
    "the last rank": (None, None, BROKEN),
    "the first rank": (BROKEN, None, None),
    "two ranks": (None, BROKEN, ALSO),
    "all ranks": (BROKEN, BROKEN, ALSO),
}


@pytest.mark.parametrize("errors", FAILURES.values(), ids=FAILURES)
def test_an_error_of_one_rank_reaches_the_others(
    three: Ranks, errors: tuple[Exception | None, ...]
) -> None:
    facts = [{} if error else SAME for error in errors]  # what failed has nothing to compare
    raised = three.fail(compare, PerRank(*facts), PerRank(*errors))
    for rank, own in enumerate(errors):
        if own is not None:
            assert (type(raised[rank]), str(raised[rank])) == (type(own), str(own))
            continue
        expected = [
            f"rank {r} cannot go on: {type(e).__name__}: {e}" for r, e in enumerate(errors) if e
        ]
        assert type(raised[rank]) is MismatchError
        assert str(raised[rank]).splitlines() == expected


def two_complaints_of_which_one_is_shown() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "_SHOWN", 1)
        agree({"a": str(dist.get_rank())}, dist.group.WORLD)


def test_a_long_list_is_cut(three: Ranks) -> None:
    for error in three.fail(two_complaints_of_which_one_is_shown).values():
        first, last = str(error).splitlines()
        assert first.startswith("rank 1 differs")
        assert last == "... and 1 more ranks"
