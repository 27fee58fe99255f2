"""Reading a record that somebody else wrote: every field is checked before it is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from kafila.errors import ProtocolError

EnumT = TypeVar("EnumT", bound=Enum)

_MOST = 2**63 - 1
"""No size, count or time of ours is larger, and arithmetic on what is not larger cannot overflow."""


class Fields:
    """A JSON object under scrutiny. Every method raises ProtocolError naming the field; unknown fields are ignored, so
    that a later version may add some."""

    def __init__(self, values: Mapping[str, object], what: str) -> None:
        self._values = values
        self._what = what

    @classmethod
    def parse(cls, text: str, what: str) -> Fields:
        """The object in ``text``; ``what`` names the record in errors."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ProtocolError(f"the {what} is not JSON") from None
        if not isinstance(value, dict):
            raise ProtocolError(f"the {what} is not a JSON object")
        return cls(value, what)

    def wrong(self, name: str) -> ProtocolError:
        """The error that says a field is missing or not what it should be."""
        return ProtocolError(f"the {self._what} is malformed: {name!r} is missing or wrong")

    def text(self, name: str) -> str:
        """A string."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self.wrong(name)
        return value

    def integer(self, name: str, least: int = 0) -> int:
        """An integer from ``least`` to what 63 bits hold."""
        value = self._values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            raise self.wrong(name)
        return value

    def integer_or(self, name: str, default: int) -> int:
        """An integer from zero on, or ``default`` where the field is absent: its writer did not know it."""
        return self.integer(name) if name in self._values else default

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise self.wrong(name)
        return value

    def number(self, name: str) -> float:
        """A number from zero to what 63 bits hold."""
        value = self._values.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise self.wrong(name)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Such a number, or null."""
        return None if name in self._values and self._values[name] is None else self.number(name)

    def choice(self, name: str, kind: type[EnumT]) -> EnumT:
        """A member of an enumeration, by its value."""
        try:
            return kind(self.text(name))
        except ValueError:
            raise self.wrong(name) from None

    def object(self, name: str) -> Fields:
        """One nested object."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name)
        return Fields(value, self._what)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(name)
        return [Fields(item, self._what) for item in value]

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name)
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, zero or more."""
        value = self._values.get(name)
        if not isinstance(value, list):
            raise self.wrong(name)
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _MOST for item in value):
            raise self.wrong(name)
        return tuple(value)
