"""Frozen dataclasses as JSON objects, strictly read (pure).

A message family is a tuple of dataclasses, each with a ``kind``. Bytes are hex, enums their value, tuples lists, nested
dataclasses objects. Reading checks every value against the field's type, so a message that decodes is one the code
expects; a field this version does not know is ignored and a missing one takes its default, so that versions can meet.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from kafila.errors import ProtocolError


def encode(message: Any) -> bytes:
    """UTF-8 JSON of a message of a family: its fields and its ``kind``."""
    plain = {"kind": message.kind, **_plain(message)}
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode(data: bytes, family: Mapping[str, Callable[..., Any]], what: str) -> Any:
    """The message of ``family`` (kind to class) in ``data``; ``what`` names it in the ProtocolError of a bad one."""
    try:
        plain = json.loads(data)
        return _read_dataclass(family[plain["kind"]], plain)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"{what} cannot be read ({type(error).__name__})") from error


def kinds(*classes: Any) -> Mapping[str, Any]:
    """A message family for :func:`decode`."""
    return {cls.kind: cls for cls in classes}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _read_dataclass(cls: Any, plain: Mapping[str, Any]) -> Any:
    values = {}
    for name, read, required in _readers(cls):
        if name in plain:
            values[name] = read(plain[name])
        elif required:
            raise KeyError(name)
    return cls(**values)


@cache
def _readers(cls: Any) -> Sequence[tuple[str, Callable[[Any], Any], bool]]:
    hints = typing.get_type_hints(cls)
    return [
        (f.name, _reader(hints[f.name]), f.default is MISSING and f.default_factory is MISSING) for f in fields(cls)
    ]


def _reader(hint: Any) -> Callable[[Any], Any]:
    """What turns a JSON value into one of type ``hint``, or raises TypeError or ValueError."""
    hint = getattr(hint, "__supertype__", hint)  # a NewType reads as what it is made of
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {types.UnionType, typing.Union}:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        read = _reader(inner)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple_reader(arguments)
    if is_dataclass(hint):
        return lambda value: _read_dataclass(hint, value)
    if issubclass(hint, tuple):  # a NamedTuple
        read_fields = _tuple_reader(tuple(typing.get_type_hints(hint).values()))
        return lambda value: hint(*read_fields(value))
    if issubclass(hint, Enum):
        read_value: Callable[[Any], Any] = hint  # an Enum class called with a value returns its member
        return read_value
    return _SCALARS[hint]


def _tuple_reader(arguments: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    if arguments[-1] is Ellipsis:
        read = _reader(arguments[0])
        return lambda value: tuple(read(item) for item in _list(value))
    reads = [_reader(argument) for argument in arguments]
    return lambda value: tuple(read(item) for read, item in zip(reads, _list(value), strict=True))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("expected a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("expected a number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected true or false")
    return value


_SCALARS: Mapping[Any, Callable[[Any], Any]] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _flag,
    bytes: bytes.fromhex,
}
