"""Reads of a compiled kernel for sm_90 what may stop it or make it slow: traps, and the stack that it spills
to."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTION = struct.Struct("<IIQQQQIIQQ")
_FRAME_SIZE, _MIN_STACK_SIZE = 0x11, 0x12  # attributes of .nv.info
_INSTRUCTION_BYTES = 16
_OPCODE = 0xFFF
_BREAKPOINT_OR_TRAP = 0x95C


def stack_bytes(cubin: bytes) -> int:
    """Of a thread, what it spills among it."""
    sizes = [0]
    for name, content in _sections(cubin):
        if name == ".nv.info":
            sizes += [
                size
                for attribute, size in _attributes(content)
                if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE)
            ]
    return max(sizes)


def has_trap(cubin: bytes) -> bool:
    return any(
        struct.unpack_from("<Q", content, at)[0] & _OPCODE == _BREAKPOINT_OR_TRAP
        for name, content in _sections(cubin)
        if name.startswith(".text.")
        for at in range(0, len(content), _INSTRUCTION_BYTES)
    )


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    table = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [_SECTION.unpack_from(elf, table + index * size) for index in range(count)]
    names = elf[headers[names_index][4] :]
    for name, kind, _, _, offset, length, *_ in headers:
        takes_no_room = kind == 8
        yield (
            names[name : names.index(b"\0", name)].decode(),
            b"" if takes_no_room else elf[offset : offset + length],
        )


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """Those of a symbol and one value."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:
            if length == 8:
                yield attribute, struct.unpack_from("<II", info, at)[1]
            at += length
