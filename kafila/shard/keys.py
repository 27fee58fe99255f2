"""Typed look-ups in a checkpoint's JSON files, which say what is wrong with which key."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafila.errors import ModelIncomplete

Json = Mapping[str, Any]

MAX_COUNT = 2**24
"""Of blocks, heads, tokens and whatever else is counted: the largest known is a context of ten million. Sizes are
multiplied and lists are made of what a file says, and a damaged one must not cost the memory of the machine."""


@dataclass(frozen=True, slots=True)
class Keys:
    """An object's keys. A key that is ``null`` is absent to all of these."""

    file: str
    """Where it stands, for people."""
    values: Json

    def get(self, key: str) -> Any:
        """Whatever it is."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelIncomplete(f"{self.file} has no {key}: is this a causal language model's checkpoint?")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelIncomplete(f"{self.file}: {key} is {value!r} and not a whole number above 0")
        if value > MAX_COUNT:
            raise ModelIncomplete(f"{self.file}: {key} is more than any model has: download the checkpoint again")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelIncomplete(f"{self.file}: {key} is {value!r} and not a number above 0")
        return float(min(value, sys.float_info.max))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Whether it is true."""
        value = self.values.get(key)
        return default if value is None else value is True


def load_keys(name: str, text: str | bytes) -> Keys:
    """The file ``name``, whose content is ``text``. Raises ModelIncomplete for what is no JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelIncomplete(f"{name} is not JSON ({error}): download the checkpoint again") from error
    if not isinstance(values, dict):
        raise ModelIncomplete(f"{name} is not a JSON object: download the checkpoint again")
    return Keys(name, values)
