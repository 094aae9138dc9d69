"""Addresses of pages and mail, read as people read them out."""

from __future__ import annotations

import re

_DOMAIN = r"(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}"
_KNOWN = "com|org|net|io|edu|gov|co|uk|de|ai|dev|app|info|me|eu|us|ca|fr|jp|nl|ch|at|tv|ly|gg|xyz"
ADDRESS = re.compile(
    rf"[a-z]+://(?P<page>\S+)|(?P<www>www\.\S+)|(?P<mail>[\w.+-]+@{_DOMAIN})"
    rf"|(?P<bare>(?:[A-Za-z0-9-]+\.)+(?:{_KNOWN})(?:[:/?#]\S*)?)",
    re.IGNORECASE,
)
_SIGNS = {
    ".": "dot", "/": "slash", "-": "dash", "_": "underscore", "@": "at", "?": "question mark", "=": "equals",
    "&": "and", "#": "hash", ":": "colon", "+": "plus", "%": "percent", "~": "tilde",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))


def read_out(address: re.Match[str]) -> str:
    """Of a match of ADDRESS: its words, digits as they are. The protocol and a slash at the end are left
    unsaid."""
    written = (address["page"] or address[0]).rstrip("/")
    return re.sub(
        r"\bwww\b", "W W W", _SIGN.sub(lambda found: f" {_SIGNS[found[0]]} ", written), flags=re.IGNORECASE
    )
