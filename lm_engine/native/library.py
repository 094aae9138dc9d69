"""Loads the compiled kernels into the process and declares their C signatures."""

from __future__ import annotations

import ctypes
import functools
import sys
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from contracts.errors import EngineError
from lm_engine.native import Unavailable
from lm_engine.native.build import BuildError, build, cache_directory

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256
MAX_QUERIES_PER_KV_HEAD = 48


class CLinear(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("dtype", c_int32),
    )


class CRope(ctypes.Structure):
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_weight", c_void_p),
        ("key_weight", c_void_p),
        ("query_heads", c_int64),
        ("key_heads", c_int64),
        ("half", c_int64),
        ("weight_dtype", c_int32),
        ("eps", c_float),
    )


class CAttention(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "out", "keys", "values")),
        *((name, c_void_p) for name in ("query_starts", "lengths", "blocks", "slots")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride", "blocks_stride")),
        *(
            (name, c_int64)
            for name in ("tokens", "sequences", "heads", "kv_heads", "head_size", "block_size", "window")
        ),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("scale", c_float),
    )


class CLowRank(ctypes.Structure):
    _fields_ = (("down", c_void_p), ("up", c_void_p))


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((f"{name}_adapter", CLowRank) for name in ("qkv", "output", "gate_up", "down")),
        ("window", c_int64),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "residual")),
        *((name, c_void_p) for name in ("normed", "qkv", "attended", "gate_up", "gated", "mixed")),
        *((name, c_void_p) for name in ("low", "added", "gate")),
        *((name, c_int64) for name in ("num_layers", "rows", "hidden", "intermediate", "layer_bytes")),
        ("rope", CRope),
        ("attention", CAttention),
        ("norm_dtype", c_int32),
        ("eps", c_float),
    )


class CRequestTable(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "blocks", "positions", "position_delta", "num_prompt")),
        ("gated_from", c_void_p),
        *((name, c_int64) for name in ("slots", "tokens_stride", "blocks_stride", "positions_stride")),
    )


class CDecode(ctypes.Structure):
    _fields_ = (
        ("layers_pass", CPass),
        ("table", CRequestTable),
        *((name, c_void_p) for name in ("cos", "sin", "axes")),
        *((name, c_void_p) for name in ("embedding", "final_norm", "head", "packed")),
        *((name, c_void_p) for name in ("adjusted_rows", "adjusted_tokens", "adjustments")),
        *((name, c_void_p) for name in ("logits", "drawn", "valid")),
        ("num_adjustments", c_int64),
        *((name, c_int32) for name in ("embedding_dtype", "threads", "status")),
    )


_P, _I, _L = c_void_p, c_int32, c_int64
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pack_linear": (None, (_P, _L, _P, _I, _L, _L, _I)),
    "advise_large_pages": (None, (_P, _L)),
    "gather_rows": (_L, (_P, _P, _L, _P, _I, _I)),
    "linear_forward": (_I, (_P, _P, _I, _L, _P, _I, _L, _L, _I)),
    "rms_norm": (None, (_P, _L, _P, _P, _I, c_float, _P, _L, _I, _L, _L, _I)),
    "silu_mul": (None, (_P, _L, _P, _L, _I, _L, _L, _I)),
    "rope_heads": (None, (_P, _P, _L, _I, _L, _I)),
    "attend": (_I, (_P, _I)),
    "decoder_pass": (_I, (_P, _I)),
    "queue_open": (_P, ()),
    "queue_submit": (c_uint64, (_P, _P)),
    "queue_wait": (None, (_P, c_uint64)),
    "queue_close": (None, (_P,)),
}


def load(path: Path) -> ctypes.CDLL:
    """Raises BuildError when the file is no library that this machine can load."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the kernels could not be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


@functools.cache
def default_library() -> ctypes.CDLL | Unavailable:
    """The library of this machine, built now if need be; the answer holds for the life of the process."""
    if sys.platform != "linux":
        return Unavailable(f"they need Linux, this is {sys.platform}")
    try:
        return load(build(cache_directory()))
    except (BuildError, OSError) as error:
        return Unavailable(str(error))


def dtype_code(tensor: Tensor) -> int:
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise EngineError(f"native kernels compute in float32 or bfloat16, not {tensor.dtype}")
    return code


def check(status: int) -> None:
    if status != 0:
        raise EngineError("native kernels: out of memory")
