"""What stands under a key is what it should be, or is named."""

from __future__ import annotations

import math

import pytest

from kafila.errors import ModelIncomplete
from kafila.shard.keys import MAX_COUNT, Keys

GOOGOL = 10**400


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", [], MAX_COUNT + 1, GOOGOL, math.nan, None])
def test_what_is_no_count_is_named(value: object) -> None:
    with pytest.raises(ModelIncomplete, match=r"config\.json.* num_hidden_layers"):
        Keys("config.json", {"num_hidden_layers": value}).count("num_hidden_layers")


@pytest.mark.parametrize("value", [0, -1.0, True, "3", [], math.nan, math.inf, -math.inf, None])
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(ModelIncomplete, match=r"config\.json.* rms_norm_eps"):
        Keys("config.json", {"rms_norm_eps": value}).number("rms_norm_eps")


def test_what_is_one_is_taken() -> None:
    keys = Keys("config.json", {"a": MAX_COUNT, "b": 1e-6, "c": GOOGOL, "d": None})
    assert (keys.count("a"), keys.count("d", 7)) == (MAX_COUNT, 7)
    assert keys.number("b") == 1e-6
    assert math.isfinite(keys.number("c"))
