"""Documents of others are bounded: what is endless, deep or odd is refused, with its place."""

from __future__ import annotations

import gzip

import pytest

from slipstream.files import document, yaml
from slipstream.files.document import DEEPEST, Unreadable, decoded, parse_json, read_bytes, unpacked
from slipstream.files.yaml import parse_yaml


def test_a_file_is_read_up_to_the_limit_and_no_further(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100)
    assert read_bytes(tmp_path / "a", 100) == b"x" * 100
    with pytest.raises(Unreadable, match="MiB long"):
        read_bytes(tmp_path / "a", 99)
    with pytest.raises(Unreadable, match="MiB long"):
        read_bytes("/dev/zero", 1000)
    with pytest.raises(Unreadable, match="not a path"):
        read_bytes("a\0b", 1)


def test_an_archive_is_unpacked_up_to_the_limit_and_no_further():
    packed = gzip.compress(b"\0" * 100_000)
    assert len(packed) < 1000
    assert len(unpacked(packed, 100_000)) == 100_000
    with pytest.raises(Unreadable, match="MiB long when it is unpacked"):
        unpacked(packed, 99_999)
    with pytest.raises(Unreadable, match="truncated or damaged"):
        unpacked(packed[:-9], 100_000)
    assert unpacked(b"{}", 2) == b"{}"


def test_text_is_utf8():
    assert decoded(b"\xef\xbb\xbf{}") == "{}"
    with pytest.raises(Unreadable, match=r"not UTF-8 text: .* at byte 1"):
        decoded(b"a\xff")


LAUGHS = "a: &a [1, 1]\n" + "".join(
    f"{chr(n)}: &{chr(n)} [{', '.join([f'*{chr(n - 1)}'] * 9)}]\n" for n in range(98, 110)
)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_yaml, "[" * 100_000, r"line 1, column 66: nested deeper than 64"),
        (parse_json, "[" * 100_000, r"line 1, column 65: nested deeper than 64"),
        (parse_json, "[" * 70 + "]" * 70, r"\[0\]\[0\].*: nested deeper than 64"),
        (parse_json, '{"a": "[[", "b": ' + "[" * 10**5, r"column 81: nested deeper than 64"),
        (parse_yaml, LAUGHS, r"line 6, column \d+: more than 200,000 values"),
        (parse_yaml, "a: &a [*a]", "line 1, column 8: an alias stands inside of what it names"),
        (parse_yaml, "a: &a {<<: *a}", "line 1, column 12: an alias stands inside"),
        (parse_yaml, "a: !!int ''", "line 1, column 4: not a value of the kind int"),
        (parse_yaml, "a: !!bool 7", "line 1, column 4: not a value of the kind bool"),
        (parse_yaml, "a: !!timestamp x", "line 1, column 4: not a value of the kind timestamp"),
        (parse_yaml, "a: !!python/object/apply:os.system [ls]", "line 1, column 4: could not"),
        (parse_yaml, "a: 0x" + "f" * 9000, "a: a number of more than 64 bits"),
        (parse_yaml, "a:\n- b: .nan", r"a\[0\]\.b: nan; allowed: finite numbers"),
        (parse_yaml, "1: 2", r"\(top level\): the key 1; allowed: text"),
        (parse_yaml, 'a: {"\\e": 1}', "a key of a: text with the character"),
        (parse_json, '{"a": [0, 1e999]}', r"a\[1\]: inf; allowed: finite numbers"),
        (parse_json, '{"a": -Infinity}', "a: -inf; allowed"),
        (parse_json, '{"a": 9223372036854775808}', "a: a number of more than 64 bits"),
        (parse_json, '{"a": ' + "9" * 5000 + "}", "line 1, column 7: a number of too many digits"),
        (parse_json, '{"a": "\\ud800"}', r"a: text with the character '\\ud800'"),
        (parse_json, '{"a": {"b": "\\u001b[31m"}}', r"a\.b: text with the character '\\x1b'"),
        (parse_json, '{"a": {"b": 1, "b": 2}}', "the key 'b' is written twice"),
    ],
)
def test_what_no_document_of_ours_has_is_refused_with_its_place(parse, text, words):
    with pytest.raises(Unreadable, match=words) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_is_within_bounds_is_read():
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert parse_json(deep) == parse_yaml(deep)
    assert parse_yaml("a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a}")["c"] == {"x": 1}
    assert parse_json('{"a": "\\u00e9\\n\\ud83d\\ude42", "b": 9223372036854775807}')["b"] > 0
    assert parse_json("") is parse_yaml("# nothing") is None


def test_the_bounds_are_those_of_the_module(monkeypatch):
    monkeypatch.setattr(yaml, "MOST_NODES", 3)
    with pytest.raises(Unreadable, match="more than 3 values"):
        parse_yaml("[1, 2, 3]")
    monkeypatch.setattr(document, "DEEPEST", 1)
    with pytest.raises(Unreadable, match="nested deeper than 1"):
        parse_json("[[[1]]]")
