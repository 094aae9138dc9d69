"""Rotary frequencies from a config's rope parameters, scaled as `transformers` scales them.

Linear: position interpolation (Chen et al. 2023). Dynamic: NTK-aware, which changes nothing up to the model's
own length. YaRN: Peng et al. 2023. Llama3: the frequency bands of Llama 3.1's release.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from lm_engine.model import RopeConfig
from model_families.checkpoint import checkpoint_error
from model_families.fields import Count, Positive


class RopeParameters(msgspec.Struct, frozen=True):
    """`rope_parameters`, or the older `rope_scaling`, of a config.json."""

    rope_type: str | None = None
    type: str | None = None  # the key's older name
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False

    @property
    def kind(self) -> str:
        kind = self.rope_type or self.type or "default"
        return "default" if kind == "mrope" else kind

    def require(self, name: str, value: float | None) -> float:
        if value is None:
            raise checkpoint_error(f"config.json: rope parameters of kind {self.kind} lack {name}")
        return value


def rope_config(
    parameters: RopeParameters,
    *,
    theta: float,
    head_dim: int,
    max_position: int,
    mrope_section: tuple[int, int, int] | None = None,
    mrope_interleaved: bool = False,
) -> RopeConfig:
    if parameters.partial_rotary_factor != 1.0:
        raise checkpoint_error("config.json: partial_rotary_factor: a partial rotary factor is not supported")
    inv_freq_P = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaling = 1.0
    sections_differ = mrope_section is not None and sum(mrope_section) != head_dim // 2
    if sections_differ and not mrope_interleaved:
        raise checkpoint_error(
            f"config.json: mrope_section {list(mrope_section or ())} does not add up to half of head_dim,"
            f" {head_dim}"
        )
    if parameters.kind == "linear":
        inv_freq_P = inv_freq_P / parameters.require("factor", parameters.factor)
    elif parameters.kind == "llama3":
        inv_freq_P = _llama3(inv_freq_P, parameters, max_position)
    elif parameters.kind == "yarn":
        inv_freq_P, scaling = _yarn(inv_freq_P, parameters, theta, max_position)
    elif parameters.kind not in ("default", "dynamic"):
        raise checkpoint_error(f"config.json: rope kind {parameters.kind!r} is not supported")
    return RopeConfig(
        theta=theta,
        inv_freq=tuple(inv_freq_P.tolist()),
        attention_scaling=scaling,
        mrope_section=mrope_section,
        mrope_interleaved=mrope_interleaved,
    )


def _llama3(inv_freq_P: Tensor, parameters: RopeParameters, max_position: int) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended linearly."""
    factor = parameters.require("factor", parameters.factor)
    low = parameters.require("low_freq_factor", parameters.low_freq_factor)
    high = parameters.require("high_freq_factor", parameters.high_freq_factor)
    original = parameters.original_max_position_embeddings or max_position
    waves_P = original * inv_freq_P / (2 * math.pi)  # full turns within the original context
    kept_P = ((waves_P - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_P) * inv_freq_P / factor + kept_P * inv_freq_P


def _yarn(
    inv_freq_P: Tensor, parameters: RopeParameters, theta: float, max_position: int
) -> tuple[Tensor, float]:
    """Dimensions that turn more than `beta_fast` times within the original context are kept, those that
    turn less than `beta_slow` times are interpolated, those between blended."""
    original = parameters.original_max_position_embeddings or max_position
    factor = parameters.factor or max_position / original
    num_pairs = inv_freq_P.shape[0]

    def dimension_turning(turns: float) -> float:
        return num_pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low = dimension_turning(parameters.beta_fast or 32.0)
    high = dimension_turning(parameters.beta_slow or 1.0)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    span = high - low if high != low else 0.001
    interpolated_P = ((torch.arange(num_pairs, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    scaled_P = inv_freq_P / factor * interpolated_P + inv_freq_P * (1 - interpolated_P)
    return scaled_P, _yarn_attention_scaling(parameters, factor)


def _yarn_attention_scaling(parameters: RopeParameters, factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.mscale and parameters.mscale_all_dim:
        return temperature(parameters.mscale) / temperature(parameters.mscale_all_dim)
    return temperature(1.0)
