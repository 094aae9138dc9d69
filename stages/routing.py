"""Which replica takes a request and which an item: by what their caches are likely to hold, and by what they
have to do, both in tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from contracts.media import MediaItem, Prompt
from stages.deployment import RoutingConfig

BLOCK_TOKENS = 16
MAX_REMEMBERED_BLOCKS = 1 << 18  # of each replica: 4 million tokens
MAX_REMEMBERED_ITEMS = 1 << 16


@dataclass(frozen=True)
class Choice:
    """To be given back to `finished`."""

    replica: str
    covered: int  # prompt tokens that the replica's cache is likely to hold
    tokens: int  # of work, as charged to the replica


@dataclass
class _Replica:
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # keys it was given, latest last
    load: int = 0  # tokens still to do
    num_requests: int = 0  # ever given to it


class PrefixRouter:
    """Requests to the replicas of a language model. It knows what each was given, not what it still holds:
    a wrong guess costs time and nothing else."""

    def __init__(self, replicas: Sequence[str], config: RoutingConfig) -> None:
        assert replicas
        self._config = config
        self._replicas = {name: _Replica() for name in replicas}
        self._prompt_tokens = self._covered_tokens = 0

    def choose(
        self, prompt: Prompt, max_tokens: int, num_samples: int, cache_salt: str | None, ready: Sequence[str]
    ) -> Choice:
        """One of `ready`, charged with the request until `finished`."""
        assert ready
        if len(self._replicas) == 1:
            return Choice(ready[0], 0, 0)
        keys = list(block_keys(prompt, cache_salt)) if self._config.by_prefix else []
        covered = {name: self._covered(name, keys) for name in ready}
        least = min(self._replicas[name].load for name in ready)
        near = [name for name in ready if self._replicas[name].load - least <= self._config.margin_tokens]
        chosen = min(near, key=lambda name: (-covered[name], self._replicas[name].load))
        replica = self._replicas[chosen]
        for key in keys:
            replica.blocks[key] = None
            replica.blocks.move_to_end(key)
        while len(replica.blocks) > MAX_REMEMBERED_BLOCKS:
            replica.blocks.popitem(last=False)
        output = min(max_tokens, self._config.expected_output) * num_samples
        tokens = len(prompt.token_ids) - covered[chosen] + output
        replica.load += tokens
        replica.num_requests += 1
        self._prompt_tokens += len(prompt.token_ids)
        self._covered_tokens += covered[chosen]
        self._rotate(chosen)
        return Choice(chosen, covered[chosen], tokens)

    def finished(self, choice: Choice) -> None:
        self._replicas[choice.replica].load -= choice.tokens

    def lost(self, name: str) -> None:
        """The replica's caches are empty. What it is charged with goes when its requests finish elsewhere."""
        if name in self._replicas:
            self._replicas[name].blocks.clear()

    def forget_blocks(self) -> None:
        for replica in self._replicas.values():
            replica.blocks.clear()

    def loads(self) -> dict[str, int]:
        return {name: replica.load for name, replica in self._replicas.items()}

    def stats(self) -> dict[str, float]:
        """Empty with one replica, which needs no choice."""
        if len(self._replicas) == 1:
            return {}
        of_each = {f"requests_to_{name}_total": r.num_requests for name, r in self._replicas.items()}
        totals = {
            "prompt_tokens_total": self._prompt_tokens,
            "covered_prompt_tokens_total": self._covered_tokens,
        }
        return {**of_each, **totals}

    def _covered(self, name: str, keys: Sequence[int]) -> int:
        blocks = self._replicas[name].blocks
        count = 0
        for key in keys:
            if key not in blocks:
                break
            count += 1
        return count * BLOCK_TOKENS

    def _rotate(self, name: str) -> None:
        """Among equals the one chosen longest ago is next."""
        self._replicas[name] = self._replicas.pop(name)


class ItemRouter:
    """Items to the replicas of an encoder: an item goes where it went before, so that it is encoded once also
    when two ask for it at the same time; a new one to whom has least to do."""

    def __init__(self, replicas: Sequence[str], config: RoutingConfig) -> None:
        assert replicas
        self._config = config
        self._load = dict.fromkeys(replicas, 0)
        self._home: OrderedDict[Hashable, str] = OrderedDict()

    def choose(self, item: MediaItem, cache_salt: str | None, ready: Sequence[str]) -> Choice:
        """One of `ready`, charged with the item until `finished`."""
        assert ready
        key = (item.pixel_digest, cache_salt)
        home = self._home.get(key)
        if home is None or home not in ready:
            home = min(ready, key=lambda name: self._load[name])
            self._load[home] = self._load.pop(home)  # among equals the one chosen longest ago is next
        self._home[key] = home
        self._home.move_to_end(key)
        if len(self._home) > MAX_REMEMBERED_ITEMS:
            self._home.popitem(last=False)
        self._load[home] += item.num_tokens
        return Choice(home, 0, item.num_tokens)

    def finished(self, choice: Choice) -> None:
        self._load[choice.replica] -= choice.tokens

    def lost(self, name: str) -> None:
        for key in [key for key, home in self._home.items() if home == name]:
            del self._home[key]


def block_keys(prompt: Prompt, cache_salt: str | None) -> Iterator[int]:
    """A key of every full block: of its tokens, the media rows in it, and all before it."""
    parent = hash(cache_salt)
    spans, first_span = prompt.spans, 0
    for start in range(0, len(prompt.token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        while first_span < len(spans) and spans[first_span].end <= start:
            first_span += 1
        media = []
        for span in spans[first_span:]:
            if span.offset >= end:
                break
            media.append((span.digest, start - span.offset))
        tokens = array("I", prompt.token_ids[start:end]).tobytes()
        parent = hash((parent, tokens, tuple(media)))
        yield parent
