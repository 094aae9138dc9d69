"""Asking for weights before they are read: while a kernel waits for what it is to multiply them by, they come
from memory into the L2 cache. Nothing is computed from it. Hopper or newer.

Every piece lies within the weight: what lies beyond could be nobody's memory. The instruction takes one
address a warp; of several, a warp asks for one after the other.
"""

import triton
import triton.language as tl


@triton.jit
def ask_by_warp(ptr, offset, BYTES: tl.constexpr):
    """Each warp for the next `BYTES` (a multiple of 16, as are pointer and offset) from byte `offset` on."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .u32 thread, lane, warp; .reg .u64 address;
        mov.u32 thread, %tid.x; and.b32 lane, thread, 31; shr.u32 warp, thread, 5;
        setp.eq.u32 first, lane, 0; mad.wide.u32 address, warp, $2, $1;
        @first cp.async.bulk.prefetch.L2.global [address], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [ptr.to(tl.int64) + offset, tl.full([], BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask(ptr, offsets, BYTES: tl.constexpr):
    """For `BYTES` from each byte offset. As many offsets as the program has threads, or a multiple: fewer are
    held, and asked for, several times."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [ptr.to(tl.int64) + offsets, tl.full(offsets.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def row_offsets(program, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Byte offsets of a program's share of all rows. Beyond the last one it begins again."""
    rows = (program * BLOCK + tl.arange(0, BLOCK)) % ROWS
    return rows.to(tl.int64) * ROW_BYTES


@triton.jit
def tile_offsets(rows_N, first_byte, ROW_BYTES: tl.constexpr, BYTES: tl.constexpr, PIECES: tl.constexpr):
    """Byte offsets [N, PIECES] of the pieces that follow `first_byte` of each row, and end within it."""
    within_1P = first_byte + tl.arange(0, PIECES)[None, :] * BYTES
    within_1P = tl.minimum(within_1P, ROW_BYTES - BYTES)
    return rows_N.to(tl.int64)[:, None] * ROW_BYTES + within_1P
