"""The page: one file without fetches from anywhere else, and the headers that hold it to that."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

PAGE = files("kafila.api").joinpath("page.html").read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    """The page's own inline blocks of a kind, as a policy names them (CSP Level 3, section 8.3)."""
    blocks = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in blocks)


PAGE_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""No script, style, picture or frame but the page's own, and no connection but to its own origin."""
