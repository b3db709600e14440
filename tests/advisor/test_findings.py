"""A finding is a value, and its patch goes over settings without mixing variants."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from slipstream.advisor.findings import Finding, merged


def test_a_finding_is_frozen_and_promises_nothing_by_itself():
    finding = Finding("note", "rank 3, forward", "slow", "look")
    assert (finding.gain, finding.patch) == (0.0, {})
    with pytest.raises(FrozenInstanceError):
        finding.gain = 1.0  # type: ignore[misc]


SETTINGS = {
    "gradients": {"split": {"kind": "by_bytes", "megabytes": 8.0}, "overlap": False},
    "trace": {"steps": 5},
}


@pytest.mark.parametrize(
    ("patch", "gradients"),
    [
        ({}, SETTINGS["gradients"]),
        (
            {"gradients": {"overlap": True}},
            {"split": {"kind": "by_bytes", "megabytes": 8.0}, "overlap": True},
        ),
        (
            {"gradients": {"split": {"kind": "single"}}},
            {"split": {"kind": "single"}, "overlap": False},
        ),
        ({"gradients": {"split": "single"}}, {"split": "single", "overlap": False}),
        (
            {"gradients": {"codec": {"kind": "half"}, "accumulate": 2}},
            {**SETTINGS["gradients"], "codec": {"kind": "half"}, "accumulate": 2},
        ),
    ],
)
def test_a_patch_goes_over_settings_and_leaves_them_as_they_were(patch, gradients):
    before = repr(SETTINGS)
    assert merged(SETTINGS, patch) == {"gradients": gradients, "trace": {"steps": 5}}
    assert repr(SETTINGS) == before


def test_a_setting_that_was_a_kind_alone_or_nothing_is_replaced():
    patch = {"split": {"kind": "by_index", "last": [1, 4]}}
    assert merged({"split": "single"}, patch) == patch
    assert merged({"split": None}, patch) == patch
    assert merged({}, patch) == patch
