"""Triton's cache of compiled kernels, safe for threads and processes that compile the same kernels at
once."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

import triton
from triton.runtime.cache import FileCacheManager


class KeepingCacheManager(FileCacheManager):  # type: ignore[misc]
    """Never replaces a shared object, nor frees the inode of one.

    CPython opens an extension, notes its inode, and then loads the path. Replaced in between, the note names
    an inode that the next kernel's launcher may get, and that kernel is launched with the wrong arguments:
    some have as many as it has, and it writes anywhere.
    """

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


def keep_launchers() -> None:
    """Only where nobody has chosen a cache manager."""
    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = KeepingCacheManager
