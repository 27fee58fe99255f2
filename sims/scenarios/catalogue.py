"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Sequence

from kafila.errors import UsageError
from sims.scenarios import families, grid, odd, outages, places, rough, sessions
from sims.scenarios.scenario import Scenario

FAMILIES = (grid, places, families, rough, outages, odd, sessions)
SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for family in FAMILIES for scenario in family.SCENARIOS}


def find(names: Sequence[str]) -> list[Scenario]:
    """The scenarios called so, a trailing ``*`` standing for any ending; all where no name is given.

    Raises UsageError for a name that none has.
    """
    if not names:
        return list(SCENARIOS.values())
    found: dict[str, Scenario] = {}
    for name in names:
        stem = name.removesuffix("*")
        matching = {n: s for n, s in SCENARIOS.items() if (n.startswith(stem) if stem != name else n == name)}
        if not matching:
            near = [n for n in SCENARIOS if name.split("-", maxsplit=1)[0].rstrip("*") in n][:5]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UsageError(f"no scenario is called {name!r}{hint} (kafila-sim nat --list shows all)")
        found |= matching
    return list(found.values())
