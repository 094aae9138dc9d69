"""Triton's cache of compiled kernels, safe for threads and processes that compile the same kernels at
once. Triton itself is an extra: imported only by who calls.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import cache
from typing import Any


@cache
def keeping_cache_manager() -> type[Any]:
    """A manager that never replaces a shared object, nor frees the inode of one.

    CPython opens an extension, notes its inode, and then loads the path. Replaced in between, the note names
    an inode that the next kernel's launcher may get, and that kernel is launched with the wrong arguments:
    some have as many as it has, and it writes anywhere.
    """
    from triton.runtime.cache import FileCacheManager

    class KeepingCacheManager(FileCacheManager):  # type: ignore[misc]
        def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
            if not filename.endswith(".so"):
                return str(super().put(data, filename, binary))
            assert isinstance(data, bytes)
            path = os.path.join(self.cache_dir, filename)
            with tempfile.NamedTemporaryFile(dir=self.cache_dir, prefix="new.") as new:
                new.write(data)
                new.flush()
                os.chmod(new.name, 0o755)
                with suppress(FileExistsError):
                    os.link(new.name, path)  # the first one stays, whoever comes at the same time
            return path

    return KeepingCacheManager


def keep_launchers() -> None:
    """Only where nobody has chosen a cache manager."""
    import triton

    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = keeping_cache_manager()
