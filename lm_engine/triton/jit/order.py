"""Programmatic dependent launch: how a kernel starts before the one in front of it has ended.

Every kernel waits (`after_predecessors`) before it touches what an earlier kernel wrote, and only then lets
the next one start. So when a kernel starts, all but its direct predecessor are complete: before waiting it
may read weights, and what the last kernel but one, or an older one, wrote.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_predecessors(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_to_l2(pointers, PDL: tl.constexpr):
    """One line each. Of use only before `after_predecessors`: it costs issue slots."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
