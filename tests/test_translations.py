"""The Chinese pages say what the English ones do: the same code, settings and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import ROOT, strategies

PAIRS = [("README.md", "README.zh.md"), ("docs/tutorial.md", "docs/zh/tutorial.md")]
CODE = re.compile(r"^(?:```.*?^```| {4}\S.*?$)", re.MULTILINE | re.DOTALL)
PASSAGE = re.compile(r"<!-- (quote|figures): (\S+) -->(.*?)<!-- / -->", re.DOTALL)


def figures(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def differences(english: str, chinese: str) -> Iterator[str]:
    """What one of them has, and the other has not."""
    for mine, own in zip_all(CODE.findall(english), CODE.findall(chinese)):
        if mine != own:
            yield f"code: {mine} and {own}"
    for mine, own in zip_all(PASSAGE.findall(english), PASSAGE.findall(chinese)):
        (_, name, text), (_, other, translated) = mine or ("", "", ""), own or ("", "", "")
        if name != other or figures(text) != figures(translated):
            yield f"figures of {name}: {text} and {translated}"
    if strategies(english) != strategies(chinese):
        yield f"settings: {strategies(english)} and {strategies(chinese)}"


def zip_all(first: list, second: list) -> Iterator[tuple]:
    length = max(len(first), len(second))
    return zip(*(part + [None] * (length - len(part)) for part in (first, second)), strict=True)


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_both_languages_have_the_same_code_settings_and_figures(english: str, chinese: str) -> None:
    texts = [(ROOT / name).read_text() for name in (english, chinese)]
    assert list(differences(*texts)) == []
    assert len(PASSAGE.findall(texts[0])) >= 8


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_they_are_linked(english: str, chinese: str) -> None:
    for page, other in ((english, chinese), (chinese, english)):
        links = re.findall(r"\[[^]]*\]\(([^)#]+)\)", (ROOT / page).read_text())
        targets = [((ROOT / page).parent / link).resolve() for link in links if "://" not in link]
        assert (ROOT / other).resolve() in targets


def test_a_translation_that_is_left_behind_is_found() -> None:
    mine = "<!-- quote: a -->1.2 of 3<!-- / -->\n\n    run it\n\n`data: {cache: {}}`"
    assert list(differences(mine, mine.replace("quote", "figures").replace("of", "/"))) == []
    for old, new in (("1.2", "1.3"), ("run", "start"), ("cache", "prefetch"), (": a", ": b")):
        assert len(list(differences(mine, mine.replace(old, new)))) == 1


def test_code_is_found_in_both_forms() -> None:
    assert CODE.findall("a\n\n    b\n\n```\nc\n```\n") == ["    b", "```\nc\n```"]
    assert Path(ROOT / PAIRS[0][0]).read_text().count("```") >= 4
