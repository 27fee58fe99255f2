"""How the planner's numbers are said to a person."""

from __future__ import annotations

from collections.abc import Sequence


def size(size_bytes: int) -> str:
    """Decimal units, as devices are sold: ``12.69 GB``, ``640 MB``, ``12 KB``."""
    for unit, name, digits in ((10**9, "GB", 2), (10**6, "MB", 0)):
        if size_bytes >= unit:
            return f"{size_bytes / unit:,.{digits}f} {name}"
    return f"{size_bytes / 1000:,.0f} KB" if size_bytes >= 1000 else f"{size_bytes} bytes"


def counted(number: int, noun: str) -> str:
    """``1 block``, ``13 blocks``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """``A``, ``A and B``, ``A, B and C``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
