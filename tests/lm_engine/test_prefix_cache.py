from array import array

import pytest

from lm_engine.block_pool import BlockPool
from lm_engine.fake_runner import FakeModel
from lm_engine.media_layout import MediaLayout
from lm_engine.prefix_cache import ROOT, BlockContent, PrefixCache
from tests.lm_engine.harness import Client, Image, config_of, greedy, prompt_of


def content(*tokens: int, extras: tuple[object, ...] = ()) -> BlockContent:
    return array("I", tokens).tobytes(), extras


def filled(cache: PrefixCache, pool: BlockPool, contents: list[BlockContent]) -> list[int]:
    blocks, parent = pool.allocate(len(contents)), ROOT
    for block, each in zip(blocks, contents, strict=True):
        parent = cache.register(block, parent, each)
    return blocks


def hits(cache: PrefixCache, contents: list[BlockContent]) -> list[int]:
    return [hit.block for hit in cache.lookup(contents)]


@pytest.fixture(params=["hash", "constant"])
def cache_and_pool(request):
    pool = BlockPool(9)
    function = hash if request.param == "hash" else (lambda _: 0)
    return PrefixCache(pool, function), pool


def test_longest_chain_is_hit_whatever_the_hash_function(cache_and_pool):
    cache, pool = cache_and_pool
    a, b, c = content(1, 2), content(3, 4), content(5, 6)
    blocks = filled(cache, pool, [a, b, c])
    assert hits(cache, [a, b, c]) == blocks
    assert hits(cache, [a, b, content(5, 7)]) == blocks[:2]
    assert hits(cache, [b, c]) == []  # the same tokens after another parent
    assert hits(cache, [a, c]) == blocks[:1]
    assert hits(cache, [content(1, 2, extras=("salt",)), b]) == []
    assert cache.check_integrity() is None


def test_colliding_hashes_never_hit_other_content():
    pool = BlockPool(40)
    cache = PrefixCache(pool, lambda _: 42)
    for i in range(30):
        filled(cache, pool, [content(i, i)])
    for i in range(30):
        assert hits(cache, [content(i, i)]) == [i + 1]
        assert hits(cache, [content(i, i + 1)]) == []


def test_a_reused_block_takes_its_children_out_of_reach(cache_and_pool):
    cache, pool = cache_and_pool
    a, b = content(1), content(2)
    blocks = filled(cache, pool, [a, b])
    pool.release(blocks)
    pool.allocate(6)  # the six blank ones
    pool.share([blocks[1]])  # keeps the child while the parent goes
    assert pool.allocate(1) == [blocks[0]]
    assert hits(cache, [a, b]) == []
    cache.register(blocks[0], ROOT, content(9))
    assert hits(cache, [content(9), b]) == [blocks[0]]  # the child is not the new content's
    assert cache.check_integrity() is None


def test_same_content_twice_keeps_the_first_block_and_chains_go_on():
    pool = BlockPool(6)
    cache = PrefixCache(pool)
    a, b = content(1), content(2)
    first = filled(cache, pool, [a])
    second = filled(cache, pool, [a, b])
    assert hits(cache, [a, b]) == [first[0], second[1]]
    assert cache.check_integrity() is None


def test_reset_forgets_blocks_in_use_too():
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    blocks = filled(cache, pool, [content(1), content(2)])
    pool.release(blocks[1:])
    cache.reset()
    assert hits(cache, [content(1)]) == []
    assert len(cache) == 0
    assert cache.check_integrity() is None
    pool.release(blocks[:1])
    assert pool.check_integrity({}) is None


def test_extras_tell_items_offsets_rows_and_masks_apart():
    size = 4

    def extras(*parts):
        layout = MediaLayout(prompt_of(*parts))
        return [layout.extras(i, i + size) for i in (0, 4, 8)]

    a, b = Image("a", 4), Image("b", 4)
    seen = [
        extras(a, b),
        extras(b, a),
        extras([1], a, b),
        extras(Image("a", 5), b),
        extras(Image("a", 5, (True, True, False, True, True)), b),
    ]
    assert len({str(each) for each in seen}) == len(seen)
    assert extras([1, 2, 3, 4, 5, 6, 7, 8], a)[:2] == [(), ()]  # text before an image does not know of it
    # A block inside an image knows which rows it holds.
    assert extras(Image("c", 12))[0] != extras(Image("c", 12))[1]


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_extras_of_all_blocks_are_those_of_each(size):
    masked = (True, True, False, True, False, False, True) * 4
    parts = ([1, 2, 3], Image("a", 21), Image("b", len(masked), masked), [4], Image("c", 9), [5] * 18)
    prompt = prompt_of(*parts)
    layout, num_blocks = MediaLayout(prompt), len(prompt.token_ids) // size
    each = [layout.extras(i * size, (i + 1) * size) for i in range(num_blocks)]
    assert layout.block_extras(num_blocks, size) == each
    assert layout.block_extras(2, size) == each[:2]  # fewer than the media reach over


def run_two(first, second, *, salts=(None, None), **options) -> tuple[Client, int]:
    """Serves two prompts one after the other; returns how much of the second was cached."""
    client = Client(config_of(), **options)
    client.add("first", first, cache_salt=salts[0])
    client.run()
    answer = client.add("second", second, cache_salt=salts[1])
    client.run()
    client.check()
    assert answer.num_cached is not None
    return client, answer.num_cached


TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("hash_function", [hash, lambda _: 0], ids=["hash", "constant"])
def test_other_image_misses_same_image_hits_text_before_is_shared(hash_function):  # CAC-01
    red, green = Image("red", 8), Image("green", 8)
    question = [9, 10, 11, 12, 13]
    one = prompt_of(TEXT, red, question)
    assert run_two(one, prompt_of(TEXT, green, question), hash_function=hash_function)[1] == 8
    client, cached = run_two(one, one, hash_function=hash_function)
    assert cached == 20
    assert client.answers["second"].asked == []  # no encoder work for what the prefix covers


def test_swapped_images_and_other_offsets_miss():  # CAC-17
    a, b = Image("a", 4), Image("b", 4)
    assert run_two(prompt_of(a, b, [1]), prompt_of(b, a, [1]))[1] == 0
    assert run_two(prompt_of([1, 2, 3, 4], a, b, [1]), prompt_of([1, 2, 3, 4], b, a, [1]))[1] == 4
    # The same placeholders in the block, the image begins one position later.
    shifted = prompt_of([39], Image("a", 7), [1, 2])
    assert run_two(prompt_of(Image("a", 7), [39, 1, 2]), shifted)[1] == 0


def test_hit_ends_inside_an_image():
    image = Image("wide", 10)
    client, cached = run_two(prompt_of([1, 2], image, [3, 4]), prompt_of([1, 2], image, [5, 6]))
    assert cached == 12
    client, cached = run_two(prompt_of([1, 2], image), prompt_of([1, 2], image))
    assert cached == 8  # the last token, an image's, is always computed
    assert client.answers["second"].asked == [0]


def test_salts_separate_tenants():  # CAC-15
    prompt = prompt_of(TEXT, Image("a", 4), [1])
    assert run_two(prompt, prompt, salts=("x", "y"))[1] == 0
    assert run_two(prompt, prompt, salts=("x", None))[1] == 0
    assert run_two(prompt, prompt, salts=("x", "x"))[1] == 12


def test_later_turns_keep_the_earlier_prefix():  # CAC-16
    client = Client(config_of())
    parts: list[object] = [[1, 2, 3]]
    cached = []
    for turn in range(4):
        parts += [Image(f"turn {turn}", 5), [10 + turn, 11, 12]]
        answer = client.add(f"t{turn}", prompt_of(*parts), greedy(max_tokens=3))
        client.run()
        parts.append(list(answer.tokens[0]))
        cached.append(answer.num_cached)
        assert answer.asked == [turn]  # only the new image is encoded
    client.check()
    assert cached[0] == 0
    lengths = [len(client.answers[f"t{turn}"].message.prompt.token_ids) for turn in range(4)]
    for turn in range(1, 4):
        assert cached[turn] >= (lengths[turn - 1] // 4) * 4


def test_prefix_cache_off_gives_the_same_tokens():
    prompt = prompt_of(TEXT, Image("a", 4), [1, 2])
    tokens = []
    for prefix_cache in (True, False):
        client = Client(config_of(prefix_cache=prefix_cache))
        client.add("first", prompt)
        client.run()
        second = client.add("second", prompt)
        client.run()
        client.check()
        assert second.num_cached == (12 if prefix_cache else 0)
        tokens.append(second.tokens)
    assert tokens[0] == tokens[1]


def test_the_fake_model_notices_a_wrong_block():
    """The ground the other tests stand on: reading another image's KV changes the tokens."""
    model = FakeModel(40)
    fold = model.read(0, model.write(0, 1, (0,)))
    other = model.read(0, model.write(0, 2, (0,)))
    assert fold != other
    client = Client(config_of())
    prompt = prompt_of(TEXT, [1, 2])
    client.add("first", prompt)
    client.run()
    client.runner._kv = {key: value + 1 for key, value in client.runner._kv.items()}
    client.add("second", prompt)
    client.run()
    assert client.answers["second"].tokens != client.expect("second")
