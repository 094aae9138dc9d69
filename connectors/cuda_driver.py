"""The few calls of the CUDA driver that torch has no words for: memory shared between processes."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from contracts.errors import EngineError

LAZY_PEER_ACCESS = 1
HANDLE_BYTES = 64


class _MemHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(f"connector 'cuda_ipc' needs the CUDA driver: {error}") from error
    pointer, size, context = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    for name, arguments in {
        "cuInit": [ctypes.c_uint],
        "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
        "cuDevicePrimaryCtxRetain": [ctypes.POINTER(context), ctypes.c_int],
        "cuCtxSetCurrent": [context],
        "cuMemAlloc_v2": [ctypes.POINTER(pointer), size],
        "cuMemFree_v2": [pointer],
        "cuIpcGetMemHandle": [ctypes.POINTER(_MemHandle), pointer],
        "cuIpcOpenMemHandle_v2": [ctypes.POINTER(pointer), _MemHandle, ctypes.c_uint],
        "cuIpcCloseMemHandle": [pointer],
        "cuMemcpyAsync": [pointer, pointer, size, ctypes.c_void_p],
        "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    }.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise EngineError(f"connector 'cuda_ipc': {name} failed with CUDA error {status}: {reason}")


class DeviceContext:
    """One GPU's primary context, which torch uses as well. Each call makes it the thread's current one."""

    def __init__(self, index: int) -> None:
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        _call("cuInit", 0)
        _call("cuDeviceGet", ctypes.byref(device), index)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, nbytes: int) -> int:
        self._enter()
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        self._enter()
        _call("cuMemFree_v2", address)

    def handle_of(self, address: int) -> bytes:
        """Opens in any other process of this host."""
        self._enter()
        handle = _MemHandle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Maps another process's memory, of whichever GPU this one reaches. It stays there until it is
        shut, also
        when its process dies."""
        self._enter()
        address = ctypes.c_uint64()
        shared = _MemHandle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), shared, LAZY_PEER_ACCESS)
        return address.value

    def shut(self, address: int) -> None:
        self._enter()
        _call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Both on GPUs; in the order of `stream`, which is of this context."""
        self._enter()
        _call("cuMemcpyAsync", target, source, nbytes, stream)

    def _enter(self) -> None:
        _call("cuCtxSetCurrent", self._context)
