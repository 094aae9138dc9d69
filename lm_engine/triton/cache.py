"""Triton's cache of compiled kernels, safe for threads and processes that compile the same kernels at
once."""

from __future__ import annotations

import triton
from triton.runtime.cache import FileCacheManager


class KeepingCacheManager(FileCacheManager):  # type: ignore[misc]
    """Never replaces a shared object that is there.

    CPython opens an extension, notes its inode, and then loads the path. Replaced in between, the note names
    an inode that the next kernel's launcher may get, and that kernel is launched with the wrong arguments.
    """

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        there = self.get_file(filename) if filename.endswith(".so") else None
        return str(super().put(data, filename, binary) if there is None else there)


def keep_launchers() -> None:
    """Only where nobody has chosen a cache manager."""
    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = KeepingCacheManager
