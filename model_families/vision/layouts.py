"""Device tensors that follow from the grids of a batch alone, kept: sizes of pictures recur."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import torch

from model_families.recurring import Recurring
from model_families.vision.packing import Grid, Segments
from model_families.vision.rotary import Rotation

# Of all layouts that a tower keeps. A patch takes some 350 bytes of them, most of it rotation.
KEPT_PATCHES = 1 << 16


@dataclass(frozen=True)
class Layout:
    """What every tower needs. Families add to it."""

    frames: Segments
    rotation: Rotation


LayoutT = TypeVar("LayoutT", bound=Layout)
Place = tuple[tuple[Grid, ...], torch.device]


class Layouts(Generic[LayoutT]):
    """`lay_out(grids, device)` of batches, the last ones kept. Used by one thread, on one stream."""

    def __init__(
        self, lay_out: Callable[[Sequence[Grid], torch.device], LayoutT], kept_patches: int = KEPT_PATCHES
    ) -> None:
        self._lay_out = lay_out
        self._kept: Recurring[Place, LayoutT] = Recurring(self._make, _num_patches, kept_patches)

    def of(self, grids: Sequence[Grid], device: torch.device) -> LayoutT:
        return self._kept.of((tuple(grids), device))

    def _make(self, place: Place) -> LayoutT:
        # What is made while nothing can be learned could not be used where something is.
        with torch.inference_mode(False):
            return self._lay_out(*place)


def _num_patches(place: Place) -> int:
    return sum(map(prod, place[0]))
