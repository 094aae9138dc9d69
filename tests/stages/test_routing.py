"""Routing to replicas: by cached prefix, by load, and an item always to the one that has it."""

from __future__ import annotations

from contracts.digests import ContentDigest
from contracts.media import MediaItem, MediaSpan, Prompt
from stages.deployment import RoutingConfig
from stages.routing import BLOCK_TOKENS, ItemRouter, PrefixRouter, block_keys

REPLICAS = ("thinker.0", "thinker.1")


def digest(name: str) -> ContentDigest:
    return ContentDigest(name.encode().ljust(16, b"."))


def item(name: str, num_tokens: int = 40) -> MediaItem:
    return MediaItem(
        modality="image", bytes_digest=digest(name), pixel_digest=digest(name), num_tokens=num_tokens
    )


def prompt(*, seed: int = 0, length: int = 100, picture: str | None = None, offset: int = 8) -> Prompt:
    tokens = [seed * 1000 + i for i in range(length)]
    if picture is None:
        return Prompt(tokens)
    tokens[offset : offset + 40] = [7] * 40
    return Prompt(tokens, (item(picture),), (MediaSpan(offset, 40, 0, digest(picture)),))


def route(router: PrefixRouter, given: Prompt, salt: str | None = None, ready=REPLICAS, max_tokens: int = 16):
    return router.choose(given, max_tokens, 1, salt, ready)


def test_keys_tell_apart_what_the_prefix_cache_tells_apart():
    cases = {
        "text": (prompt(), None),
        "other text": (prompt(seed=1), None),
        "salted": (prompt(), "salt"),
        "picture": (prompt(picture="cat"), None),
        "other picture": (prompt(picture="dog"), None),
        "picture moved": (prompt(picture="cat", offset=9), None),
    }
    chains = {name: tuple(block_keys(*case)) for name, case in cases.items()}
    assert all(len(chain) == 100 // BLOCK_TOKENS for chain in chains.values())
    assert len({chain[0] for chain in chains.values()}) == len(cases)
    # The last block holds no picture, but what lies before it is part of its key.
    assert len({chain[-1] for chain in chains.values()}) == len(cases)


def test_a_conversation_stays_where_its_prefix_is():
    router = PrefixRouter(REPLICAS, RoutingConfig())
    first = {seed: route(router, prompt(seed=seed, picture="cat")).replica for seed in range(4)}
    assert sorted(first.values()) == ["thinker.0", "thinker.0", "thinker.1", "thinker.1"]
    for seed, replica in first.items():
        again = route(router, prompt(seed=seed, length=180, picture="cat"))
        assert again.replica == replica
        assert again.covered == 96


def test_a_long_queue_outweighs_a_prefix():
    router = PrefixRouter(REPLICAS, RoutingConfig(margin_tokens=300))
    home = route(router, prompt()).replica
    queued = []
    while (choice := route(router, prompt())).replica == home:
        assert choice.covered == 96
        queued.append(choice)
    assert choice.covered == 0
    assert router.loads()[home] > 300
    for one in queued:
        router.finished(one)
    assert route(router, prompt()).covered == 96


def test_loads_return_to_zero():
    router = PrefixRouter(REPLICAS, RoutingConfig())
    choices = [route(router, prompt(seed=i)) for i in range(5)]
    assert sum(router.loads().values()) == 5 * (100 + 16)
    for choice in choices:
        router.finished(choice)
    assert set(router.loads().values()) == {0}


def test_a_lost_replica_has_nothing_cached_and_takes_nothing_until_it_is_ready():
    router = PrefixRouter(REPLICAS, RoutingConfig())
    home = route(router, prompt()).replica
    (other,) = set(REPLICAS) - {home}
    router.lost(home)
    assert route(router, prompt(), ready=(other,)).replica == other
    assert route(router, prompt()).replica == other


def test_without_prefixes_requests_go_round():
    router = PrefixRouter(REPLICAS, RoutingConfig(by_prefix=False))
    assert [route(router, prompt()).replica for _ in range(4)] == [*REPLICAS, *REPLICAS]


def test_an_item_is_encoded_in_one_place():
    encoders = ("vision.0", "vision.1")
    router = ItemRouter(encoders, RoutingConfig())
    cat = router.choose(item("cat"), None, encoders)
    assert router.choose(item("cat"), None, encoders).replica == cat.replica
    assert router.choose(item("dog"), None, encoders).replica != cat.replica
    assert router.choose(item("bird", 10), None, encoders).replica != cat.replica
    router.lost(cat.replica)
    (other,) = set(encoders) - {cat.replica}
    assert router.choose(item("cat"), None, (other,)).replica == other
    assert router.choose(item("cat"), None, encoders).replica == other
