"""Kernels compiled by several threads and processes at once, in one cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def test_a_launcher_that_may_be_loading_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.cache import get_cache_manager

    import lm_engine.triton.launch  # noqa: F401  installs the manager

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    one, other = get_cache_manager("ab"), get_cache_manager("ab")
    launcher = one.put(b"launcher", "launcher.so")
    inode = Path(launcher).stat().st_ino
    assert other.put(b"launcher", "launcher.so") == launcher
    assert Path(launcher).stat().st_ino == inode
    one.put_group("kernel.json", {"kernel.json": launcher})
    other.put_group(
        "kernel.json", {"kernel.cubin": launcher}
    )  # what describes it is: it may have been broken
    assert one.get_group("kernel.json") == {"kernel.cubin": launcher}
