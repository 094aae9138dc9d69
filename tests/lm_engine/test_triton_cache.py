"""Kernels compiled by several threads and processes at once, in one cache folder."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")


def test_a_launcher_that_may_be_loading_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.cache import get_cache_manager

    import contracts.triton_cache

    contracts.triton_cache.keep_launchers()

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


def test_of_many_who_build_a_launcher_at_once_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has seen that it is missing; a second one must not take its place, however late it looks."""
    from contracts.triton_cache import keeping_cache_manager

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    managers = [keeping_cache_manager()("ab") for _ in range(8)]
    assert not any(manager.get_file("launcher.so") for manager in managers)
    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(lambda m: m.put(str(id(m)).encode(), "launcher.so"), managers))
    (path,) = paths
    first, inode = Path(path).read_bytes(), Path(path).stat().st_ino
    managers[0].put(b"late", "launcher.so")
    assert Path(path).read_bytes() == first
    assert Path(path).stat().st_ino == inode
    assert [file.name for file in Path(path).parent.iterdir()] == ["launcher.so"]


class SlowKernel:
    """Compiles only when the test lets it, and must be launched complete."""

    params = (SimpleNamespace(do_not_specialize=False),) * 2

    def __init__(self) -> None:
        self.compiled: list[object] = []
        self.loading = False
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._guard = threading.Lock()

    def warmup(self, *args: object, grid: tuple[int, ...], **options: object) -> None:
        if args in self.compiled:
            return
        self.begun.set()
        assert self.go_on.wait(30)
        self.compiled.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return self._launch

    def _launch(self, *args: object, **options: object) -> None:
        assert args in self.compiled, "compiled by its launch, one thread after another"
        assert self._guard.acquire(blocking=False), "launched by two threads at once"
        self._guard.release()


def test_a_variant_is_compiled_once_by_all_threads_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_engine.triton.launch as launching

    monkeypatch.setattr(launching, "interpreted", lambda: False)
    kernel = SlowKernel()
    x = torch.zeros(4)
    with launching.compiling_ahead(), ThreadPoolExecutor(4) as threads:
        launches = [threads.submit(launching.launch, kernel, (1,), x, 56, BLOCK=16) for _ in range(4)]
        assert kernel.begun.wait(30)
        kernel.go_on.set()
        for one in launches:
            one.result(30)
    assert len(kernel.compiled) == 1


def test_variants_are_told_apart_as_triton_does() -> None:
    from lm_engine.triton.launch import _kind

    whole = torch.zeros(64)
    assert _kind(whole) == _kind(whole[16:]) != _kind(whole[1:])
    assert _kind(56) == _kind(40) != _kind(64)
    assert len({_kind(value) for value in (1, 16, 2, 0.5, None)}) == 5


def test_what_a_kernel_is_called_in_the_cache_does_not_hang_on_those_before_it() -> None:
    """Older versions of Triton put constants of the functions that a kernel calls into its key only if
    another kernel has been compiled with them before: in another order, what was compiled is not found."""
    from lm_engine.triton import jit

    modules = [import_module(f"{jit.__name__}.{module.name}") for module in iter_modules(jit.__path__)]
    functions = [
        function
        for module in [*modules, import_module("vocoder.jit")]
        for function in vars(module).values()
        if isinstance(function, triton.runtime.jit.JITFunction)
    ]
    assert len(functions) > 20
    for function in functions:
        assert function.cache_key
        assert not function.used_global_vals, f"{function.__name__} reads a constant: write it out"
