"""Keys and values in e4m3 with an exponent for each head of a token, as `attention/quantised.py`."""

import triton
import triton.language as tl


@triton.jit
def head_exponent(most):
    """int32 of the largest magnitudes: the least exponent with which they are at most 448."""
    bits = most.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum(exponent, -126)


@triton.jit
def power(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(values):
    """float32 of at most 448 to the nearest that e4m3 has, ties to even: the cast is exact then, whatever its
    rounding (the interpreter's loses carries)."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (values + 24576.0) - 24576.0  # 1.5 · 2¹⁴, whose last bit is worth 2⁻⁹
    return tl.where(tl.abs(values) < 0.015625, subnormal, normal)


@triton.jit
def quantise(values, exponent):
    """As they will be read, float32, and as they are stored."""
    rounded = _rounded(values.to(tl.float32) * power(-exponent))
    return rounded * power(exponent), rounded.to(tl.float8e4nv)


@triton.jit
def widen(values, DTYPE: tl.constexpr):
    """e4m3 (or any) in a type that holds all of it. By way of float32, in pairs: straight to bfloat16 a GPU
    converts one after the other, at a sixteenth of the rate."""
    return values.to(tl.float32).to(DTYPE)


@triton.jit
def load_powers(exponent_ptrs, inside):
    return power(tl.load(exponent_ptrs, mask=inside, other=0).to(tl.int32))
