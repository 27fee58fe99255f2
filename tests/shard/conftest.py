"""What tests of fetching share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of the tests are on this machine, whatever its proxy is for."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
