"""Snake activations as vocoder checkpoints store them: logarithms of the frequency, and of the gain's
inverse."""

from __future__ import annotations

from torch import Tensor

EPS = 1e-9


def snake_name(name: str) -> str:
    """`x.alpha` → `x.frequency`, `x.beta` → `x.gain`; others as they are."""
    path, _, kind = name.rpartition(".")
    ours = {"alpha": "frequency", "beta": "gain"}.get(kind)
    return name if ours is None else f"{path}.{ours}"


def finish_snakes(name: str, stored: Tensor) -> Tensor:
    if name.endswith(".frequency"):
        return stored.float().exp()[:, None]
    if name.endswith(".gain"):
        return 1.0 / (stored.float().exp() + EPS)[:, None]
    return stored
