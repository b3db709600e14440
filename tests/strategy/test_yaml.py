"""Documents are read exactly or refused: nothing is dropped or changes its type unsaid."""

from __future__ import annotations

import pytest

from slipstream.errors import StrategyError
from slipstream.strategy import ByBytesConfig, Strategy, TraceConfig


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the document is empty; allowed: a mapping; write {}"),
        ("# nothing\n", "the document is empty"),
        ("- a\n- b\n", "(top level): got ['a', 'b']; allowed: a mapping"),
        ("overlap", "(top level): got 'overlap'; allowed: a mapping"),
        ("trace: {}\ntrace: {}\n", "line 2, column 1: the key 'trace' is written twice"),
        ("trace: {skip: 1, skip: 2}", "line 1, column 18: the key 'skip' is written twice"),
        ("gradients: [", "not valid YAML, line 1, column 13:"),
        ("trace:\n\tskip: 1\n", "not valid YAML, line 2, column 1:"),
        ("a: 1\n---\nb: 2\n", "not valid YAML, line 2, column 1:"),
        ("trace: !!python/name:os.system {}", "not valid YAML, line 1, column 8:"),
        (
            "trace: 2026-13-45",
            "not valid YAML, line 1, column 8: not a value of the kind timestamp: month must be",
        ),
        ("trace: {folder: 2026-11-21}", "trace.folder: got datetime.date(2026, 11, 21)"),
        ("? [a]\n: 1\n", "not valid YAML, line 1, column 3: found unhashable key"),
        ("trace: &t {skip: *t}", "line 1, column 18: an alias stands inside of what it names"),
        ("[" * 5000, "not valid YAML, line 1, column 66: nested deeper than 64"),
        ("trace: \0", "not valid YAML, line 1, column 8: unacceptable character #x0000"),
    ],
)
def test_wrong_yaml(text, words):
    with pytest.raises(StrategyError) as caught:
        Strategy.from_yaml(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" \n", "the document is empty"),
        ("null", "the document is empty"),
        ("[1]", "(top level): got [1]"),
        ('{"trace": {}, "trace": {}}', "the key 'trace' is written twice"),
        ('{"trace":\n {]}', "not valid JSON, line 2, column 3:"),
        (
            '{"gradients": {"split": {"kind": "by_bytes", "megabytes": NaN}}}',
            "gradients.split.megabytes: nan; allowed: finite numbers",
        ),
    ],
)
def test_wrong_json(text, words):
    with pytest.raises(StrategyError) as caught:
        Strategy.from_json(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "megabytes"), [("1e2", 100), ("1.5e1", 15), ("+3E0", 3), (".5e1", 5)]
)
def test_exponents_are_numbers(text, megabytes):
    config = Strategy.from_yaml(f"gradients: {{split: {{kind: by_bytes, megabytes: {text}}}}}")
    assert config.gradients.split == ByBytesConfig(megabytes=megabytes)


@pytest.mark.parametrize(
    "folder", ["1e2", ".5e1", "true", "null", "2026-11-21", "~", "a: b", "\x85", "\ufeff"]
)
def test_text_that_looks_like_something_else_stays_text(folder):
    config = Strategy(trace=TraceConfig(folder=folder))
    assert Strategy.from_yaml(config.to_yaml()) == config


def test_merge_keys_are_read():
    text = "trace: &t {skip: 1}\n"
    merged = "trace:\n  <<: {skip: 5}\n  steps: 3\n"
    assert Strategy.from_yaml(text).trace.skip == 1
    assert Strategy.from_yaml(merged).trace.skip == 5


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.yaml", None, "missing.yaml: cannot be read: No such file or directory"),
        ("notes.txt", b"", "notes.txt: a strategy file ends in .yaml, .yml, .json"),
        ("latin.yaml", b"trace: {folder: \xe9}", "latin.yaml: not UTF-8 text"),
        ("empty.json", b"", "empty.json: the document is empty"),
        ("typo.yaml", b"tracer: {}", "typo.yaml: Strategy has 1 problem:\n  tracer: no such"),
    ],
)
def test_wrong_files(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(StrategyError) as caught:
        Strategy.load(tmp_path / name)
    assert words in str(caught.value)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "s.yaml").mkdir()
    with pytest.raises(StrategyError, match=r"s\.yaml: cannot be read: Is a directory"):
        Strategy.load(tmp_path / "s.yaml")
