"""Reading files that people write: every mistake is a UsageError that names the file, the place and the key."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kafila.errors import UsageError

EnumT = TypeVar("EnumT", bound=Enum)

DATA = Path(__file__).parent / "data"
"""The files that ship with the simulator."""

Table = Mapping[str, object]


def load_table(path: Path) -> Table:
    """The table in a TOML or JSON file, told apart by its ending (anything but .json is TOML)."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text ({error})") from None
    try:
        value: object = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"{path}: not {kind} ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a table of keys and values")
    return value


class Section:
    """One table of a file; ``where`` names it in errors."""

    def __init__(self, table: object, where: str, keys: Collection[str]) -> None:
        """Raises UsageError where ``table`` is none or has other keys than ``keys``."""
        if not isinstance(table, Mapping):
            raise UsageError(f"{where}: not a table of keys and values")
        for key in table:
            if key not in keys:
                raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(keys))}")
        self.where = where
        self._table = table

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def text(self, key: str) -> str:
        """A non-empty string."""
        value = self._table.get(key)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{self.where}: {key!r} must be a text")
        return value

    def number(self, key: str, *, least: float = 0.0, most: float = math.inf) -> float:
        """A finite number from ``least`` to ``most``."""
        return self._number(key, self._table.get(key), least, most)

    def optional_number(self, key: str) -> float | None:
        """A finite number, zero or more, or nothing."""
        return self.number(key) if key in self else None

    def span(self, key: str) -> tuple[float, float]:
        """A number, or a list of the two ends of a range."""
        value = self._table.get(key)
        ends = value if isinstance(value, list) else [value, value]
        if len(ends) != 2:
            raise UsageError(f"{self.where}: {key!r} must be a number or a range of two")
        low, high = (self._number(key, end, 0.0) for end in ends)
        if low > high:
            raise UsageError(f"{self.where}: {key!r} has its ends the wrong way round")
        return low, high

    def pair(self, key: str) -> tuple[str, str]:
        """A list of two texts."""
        value = self._table.get(key)
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.where}: {key!r} must be a list of two names")
        return value[0], value[1]

    def choice(self, key: str, kind: type[EnumT]) -> EnumT:
        """One of an enumeration's values."""
        value = self._table.get(key)
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise UsageError(f"{self.where}: {key!r} must be one of {known}") from None

    def tables(self, key: str) -> list[object]:
        """A list of tables, empty where the key is missing."""
        value = self._table.get(key, [])
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: {key!r} must be a list of tables")
        return value

    def named_tables(self, key: str) -> Mapping[str, object]:
        """A table of tables, empty where the key is missing."""
        value = self._table.get(key, {})
        if not isinstance(value, Mapping):
            raise UsageError(f"{self.where}: {key!r} must be a table of tables")
        return value

    def _number(self, key: str, value: object, least: float, most: float = math.inf) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UsageError(f"{self.where}: {key!r} must be a number")
        try:
            number = float(value)
        except OverflowError:
            raise UsageError(f"{self.where}: {key!r} is too large") from None
        if not math.isfinite(number) or number < least:
            raise UsageError(f"{self.where}: {key!r} must be {least:g} or more")
        if number > most:
            raise UsageError(f"{self.where}: {key!r} must be {most:g} or less")
        return number
