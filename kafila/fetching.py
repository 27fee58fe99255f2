"""What people are told while members fetch their shares: one line at a member, one in all at the host (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

TOLD_EVERY_S = 1.0
"""How often a member tells the host. The rendezvous carries it, which counts messages."""

BAR_CHARS = 20


@dataclass(slots=True)
class _Share:
    done: int
    wanted: int
    first: int
    """What was there when fetching began, which says nothing of the speed."""
    began: float
    told: float | None = None
    finished: bool = False


@dataclass(slots=True)
class Fetches:
    """The shares being fetched, by member. ``everybody``: at the host, whose line is of all."""

    everybody: bool
    _shares: dict[str, _Share] = field(default_factory=dict)

    def update(self, name: str, done: int, wanted: int, now: float) -> None:
        """A member is so far."""
        share = self._shares.get(name)
        if share is None or share.wanted != wanted or done < share.done:
            self._shares[name] = share = _Share(done, wanted, done, now)
        share.done = done

    def is_due(self, name: str, done: int, wanted: int, now: float) -> bool:
        """Whether to tell others how far ``name`` is: the first, the last, and one a second between."""
        share = self._shares.get(name)
        if share is None:
            self.update(name, done, wanted, now)
            share = self._shares[name]
        if share.told is not None and done < wanted and now - share.told < TOLD_EVERY_S:
            return False
        share.told = now
        return True

    def line(self, now: float) -> str:
        """How far it is."""
        shares = self._shares.values()
        done, wanted = sum(share.done for share in shares), sum(share.wanted for share in shares)
        fresh = done - sum(share.first for share in shares)
        spent = now - min((share.began for share in shares), default=now)
        parts = [f"fetching {bar(done, wanted)} {percent(done, wanted)} of {size(wanted)}"]
        if fresh > 0 and spent > 0:
            speed = fresh / spent
            parts.append(f"{size(speed)}/s")
            if wanted > done:
                parts.append(f"{duration((wanted - done) / speed)} left")
        if self.everybody and len(self._shares) > 1:
            parts.append(
                " ".join(f"{name} {percent(share.done, share.wanted)}" for name, share in self._shares.items())
            )
        return ", ".join(parts)

    def finished(self, name: str, now: float) -> str | None:
        """What there was to a member's share, once all of it is there."""
        share = self._shares[name]
        if share.done < share.wanted or share.finished:
            return None
        share.finished = True
        who = f"{name} has its share: " if self.everybody else ""
        if share.done == share.first:
            return f"{who}{size(share.wanted)} were there already, nothing is fetched"
        return f"{who}fetched {size(share.done - share.first)} of {size(share.wanted)} in {duration(now - share.began)}"


def bar(done: int, wanted: int) -> str:
    """How much of it, drawn."""
    filled = BAR_CHARS * done // wanted if wanted else BAR_CHARS
    return f"[{'#' * filled}{'.' * (BAR_CHARS - filled)}]"


def size(count: float) -> str:
    """Bytes for a person: three figures and a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} bytes"


def percent(done: int, wanted: int) -> str:
    """How much of it: 100% only for all of it."""
    return f"{100 * done // wanted if wanted else 100}%"


def duration(seconds: float) -> str:
    """Seconds for a person."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
