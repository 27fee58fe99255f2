"""What people are told while members fetch their shares: one line at a member, one in all at the host (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

TOLD_EVERY_S = 1.0
"""How often a member tells the host. The rendezvous carries it, which counts messages."""


@dataclass(slots=True)
class _Share:
    done: int
    wanted: int
    first: int
    """What was there when fetching began, which says nothing of the speed."""
    began: float
    told: float | None = None


@dataclass(slots=True)
class Fetches:
    """The shares being fetched, by member. ``everybody``: at the host, whose line is of all."""

    everybody: bool
    _shares: dict[str, _Share] = field(default_factory=dict)
    _over: bool = False

    def update(self, name: str, done: int, wanted: int, now: float) -> None:
        """A member is so far."""
        share = self._shares.get(name)
        if share is None or share.wanted != wanted or done < share.done:
            self._shares[name] = share = _Share(done, wanted, done, now)
        share.done = done
        self._over = False

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
        parts = [f"fetching {size(done)} of {size(wanted)} ({percent(done, wanted)})"]
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

    def finished(self, now: float) -> str | None:
        """Once, when all that is being fetched is there: what there was to it."""
        shares = self._shares.values()
        if self._over or not shares or any(share.done < share.wanted for share in shares):
            return None
        self._over = True
        fresh = sum(share.done - share.first for share in shares)
        held = sum(share.first for share in shares)
        spent = duration(now - min(share.began for share in shares))
        there = f"{size(held)} were there already"
        if not fresh:
            return f"nothing to fetch: {there}"
        return f"fetched {size(fresh)} in {spent}" + (f", {there}" if held else "")


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
