"""A counting encoder whose embeddings depend on the pixels alone, and messages to feed the pool with."""

from __future__ import annotations

import torch
from torch import Tensor

from contracts.digests import Digester
from contracts.media import MediaItem
from contracts.messages import Encode, Failed, FeaturesConsumed, FeaturesNeeded
from encoder_pool.model import EncoderInput, GraphBounds
from encoder_pool.outcomes import Embedded
from encoder_pool.pool import EncoderPool

WIDTH = 4
ROW_BYTES = WIDTH * 4
DIGESTER = Digester(secret=b"0" * 16)


class FakeEncoder:
    """`calls` lists the pixel value of every item of every successful or failed call."""

    encoder_id = "fake"
    embedding_width = WIDTH
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.poison: set[int] = set()
        self.rows_short = 0
        self.num_drops = self.num_replays = 0
        self.error: type[Exception] = RuntimeError

    def encode(self, items: list[EncoderInput]) -> list[Tensor]:
        values = [int(i.features.flatten()[0]) for i in items]
        self.calls.append(values)
        if self.poison & set(values):
            raise self.error("bad pixels")
        packed = torch.cat([expected(v, i.num_tokens) for v, i in zip(values, items, strict=True)])
        parts = packed.split([i.num_tokens for i in items])
        return [part[: len(part) - self.rows_short] for part in parts]

    def allow_graphs(self, bounds: GraphBounds, *, ahead: bool) -> None: ...

    def drop_graphs(self) -> None:
        self.num_drops += 1


def expected(value: int, num_tokens: int) -> Tensor:
    return torch.full((num_tokens, WIDTH), float(value)) + torch.arange(num_tokens)[:, None] / 64


def pixels(value: int, grid: tuple[int, int, int] = (1, 2, 2)) -> Tensor:
    return torch.full((grid[1] * 2, grid[2] * 2, 3), value, dtype=torch.uint8)


def encode_message(
    request_id: str,
    value: int,
    item_index: int = 0,
    *,
    grid: tuple[int, int, int] = (1, 2, 2),
    salt: str | None = None,
    target: str = "thinker",
) -> Encode:
    digest = DIGESTER.of_array(pixels(value, grid).numpy())
    item = MediaItem(
        modality="image",
        bytes_digest=digest,
        pixel_digest=digest,
        num_tokens=grid[0] * grid[1] * grid[2] // 4,
        grid_thw=grid,
        source_size=(grid[2] * 2, grid[1] * 2),
    )
    return Encode(request_id=request_id, item_index=item_index, item=item, target=target, cache_salt=salt)


def add(pool: EncoderPool, request_id: str, value: int, item_index: int = 0, **options) -> Encode:
    """Adds with features."""
    message = encode_message(request_id, value, item_index, **options)
    pool.add(message, pixels(value, message.item.grid_thw))
    return message


def drain(pool: EncoderPool, *, release: bool = True):
    """Steps until there is no work; returns the outcomes by kind. Checks the laws after every step."""
    embedded: list[Embedded] = []
    needed: list[FeaturesNeeded] = []
    consumed: list[FeaturesConsumed] = []
    failed: list[Failed] = []
    lists = {Embedded: embedded, FeaturesNeeded: needed, FeaturesConsumed: consumed, Failed: failed}
    for _ in range(10_000):
        if not pool.has_work():
            break
        for outcome in pool.step():
            lists[type(outcome)].append(outcome)
            if release and isinstance(outcome, Embedded):
                pool.release(outcome.request_id, outcome.item_index)
        assert pool.check_integrity() is None
    assert not pool.has_work()
    return embedded, needed, consumed, failed
