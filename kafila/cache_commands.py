"""``kafila-node cache``: what has been fetched to this machine, and getting rid of it."""

from __future__ import annotations

import time
from datetime import datetime

import click

from kafila.errors import UsageError
from kafila.fetching import size
from kafila.shard.cache_folder import Cached, cache_folder, cached, prune

_DAY_S = 86_400.0


def list_cache() -> None:
    """A line for each checkpoint, the one used last first."""
    root = cache_folder()
    found = cached(root)
    if not found:
        click.echo(f"nothing has been fetched into {root}")
        return
    rows = [("fetched", "of", "last used", "from", "folder")]
    rows += [
        (size(item.bytes_held), size(item.bytes_in_all), _day(item.used), item.source, item.path.name) for item in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    click.echo(f"{size(sum(item.bytes_held for item in found))} in {root}")


def prune_cache(older_than_days: float | None, *, everything: bool) -> None:
    """Remove checkpoints nobody uses; those in use stay. Raises UsageError, FetchFailed."""
    if everything == (older_than_days is not None):
        raise UsageError("say what to remove: --older-than DAYS, what was not used for so long, or --all")
    removed, kept = prune(cache_folder(), time.time() - (older_than_days or 0.0) * _DAY_S)
    for item in removed:
        click.echo(f"removed {item.source}, {size(item.bytes_held)}")
    for item in kept:
        click.echo(f"kept {item.source}: a kafila-node uses it")
    click.echo(f"{size(_held(removed))} are free now")


def _held(items: list[Cached]) -> int:
    return sum(item.bytes_held for item in items)


def _day(when: float) -> str:
    return datetime.fromtimestamp(when).astimezone().strftime("%Y-%m-%d %H:%M")
