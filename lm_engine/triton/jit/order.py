"""Programmatic dependent launch: how a kernel starts before the one in front of it has ended.

Every kernel waits (`after_predecessors`) before it touches what an earlier kernel wrote, so a kernel's end
still follows that of all before it. What it may do before waiting depends on when those before let it start:

    linears       let the next kernel start at once (EARLY). Before they wait they read weights alone.
    all others    let it start only after their own wait.
    attention     reads lengths, slots, block tables and older keys before it waits: written by earlier steps,
                  and by this step's first kernel. Both are complete: that one is launched without all this.
                  Walks also read their plan, which is older than the kernel in front of theirs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_predecessors(PDL: tl.constexpr, EARLY: tl.constexpr = False):
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
