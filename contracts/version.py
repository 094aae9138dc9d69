"""The version of this package, in the one place that names it."""

from __future__ import annotations

VERSION = "0.1.0"
