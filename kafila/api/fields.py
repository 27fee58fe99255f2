"""The fields of a JSON request, each read once and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NoReturn

from kafila.api.refusals import Refused

MAX_INTEGER = 2**63 - 1


def parse_object(body: bytes) -> Fields:
    """A request's body. Refuses what is not a JSON object."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request's body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refused(400, "the request's body is not a JSON object", code="invalid_json")
    return Fields(value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Fields:
    """A JSON object; null counts as absent. ``where`` names it in errors, as ``messages[2].``."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """Whatever stands there; None where nothing does."""
        return self._values.get(name)

    def path(self, name: str) -> str:
        """The field's name for people."""
        return f"{self._where}{name}"

    def refuse(self, name: str, complaint: str) -> NoReturn:
        """Refuse the request for this field."""
        raise Refused(400, f"{self.path(name)} {complaint}", param=self.path(name), code="invalid_value")

    def text(self, name: str, default: str | None = None) -> str:
        """A string of whole characters."""
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, str):
            self.refuse(name, "is missing" if value is None else "is not a string")
        return self.whole(name, value)

    def whole(self, name: str, value: str) -> str:
        """``value``, which must be text: JSON can spell halves of characters."""
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse(name, "holds half of a character (an unpaired surrogate)")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "is neither true nor false")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "is not a number")
        if (isinstance(value, int) and abs(value) > MAX_INTEGER) or not isfinite(value):
            self.refuse(name, "is far too large")
        return float(value)

    def integer(self, name: str, default: int, least: int, most: int = MAX_INTEGER) -> int:
        """A whole number between two bounds."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, float) and isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, "is not a whole number")
        if not least <= value <= most:
            self.refuse(name, f"is not between {least} and {most}" if most != MAX_INTEGER else f"is below {least}")
        return value

    def object(self, name: str) -> Fields:
        """An object within; empty where there is none."""
        value = self._values.get(name)
        if value is None:
            return Fields({}, f"{self.path(name)}.")
        if not isinstance(value, dict):
            self.refuse(name, "is not an object")
        return Fields(value, f"{self.path(name)}.")

    def objects(self, name: str) -> Sequence[Fields]:
        """A list of objects; empty where there is none."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.refuse(name, "is not a list")
        for at, one in enumerate(value):
            if not isinstance(one, dict):
                self.refuse(f"{name}[{at}]", "is not an object")
        return [Fields(one, f"{self.path(name)}[{at}].") for at, one in enumerate(value)]

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of them; empty where there is none."""
        value = self._values.get(name)
        if value is None:
            return ()
        written = [value] if isinstance(value, str) else value
        if not isinstance(written, list) or not all(isinstance(one, str) for one in written):
            self.refuse(name, "is neither a string nor a list of strings")
        return tuple(self.whole(name, one) for one in written)

    def json(self, name: str) -> str:
        """What stands there as JSON again; empty where nothing does."""
        value = self._values.get(name)
        return "" if value is None else self.whole(name, json.dumps(value, ensure_ascii=False))
