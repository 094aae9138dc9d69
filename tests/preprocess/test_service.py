"""Identity of items: a repeated image costs one hash, and nothing but equal content and options is equal."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from PIL import Image

from contracts.digests import Digester
from contracts.errors import BadRequest, MediaDecodeError, MediaError, MediaFetchError
from contracts.media import MediaItem, MediaOptions, MediaSource
from contracts.specs import ImageSpec, MediaLimits, MediaSpecs
from preprocess import fetch
from preprocess.data_url import decode_data_url
from preprocess.index import MediaIndex
from preprocess.jobs import PoolConfig
from preprocess.service import Preprocessor, PreprocessorConfig, ResolvedMedia
from tests.preprocess.http_server import answer, serving
from tests.preprocess.samples import TINY, data_url, encode, noise, picture
from tests.rounds import run_watched, until

PNG = encode(noise(48, 32))


@asynccontextmanager
async def running(num_workers: int = 1, **pool: object) -> AsyncIterator[Preprocessor]:
    defaults = {"arena_bytes": 1 << 20, "limits": MediaLimits(allow_private_addresses=True)}
    service = Preprocessor(PreprocessorConfig(PoolConfig(num_workers, **(defaults | pool))))
    try:
        await service.start()
        yield service
        assert service.check_integrity() is None
        assert not service._flights
        assert not len(service._reads)
    finally:
        await service.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_watched(scenario, timeout_s=180)


def source(data: bytes, param: str = "messages[0]", **options: object) -> MediaSource:
    return MediaSource("image", data_url(data), MediaOptions(**options), param)


async def one(
    service: Preprocessor, given: MediaSource, spec: ImageSpec = TINY, auto_max_pixels: int | None = None
) -> ResolvedMedia:
    (resolved,) = await service.resolve(given, MediaSpecs(image=spec), auto_max_pixels)
    return resolved


async def resolve(service: Preprocessor, data: bytes, **options: object) -> ResolvedMedia:
    resolved = await one(service, source(data, **options))
    resolved.release()
    return resolved


def test_a_repeated_image_is_neither_decoded_nor_resized() -> None:
    async def scenario() -> None:
        async with running() as service:
            first = await one(service, source(PNG))
            assert first.item.features is not None
            assert first.processed is not None
            (pid,) = service.pool.worker_pids()
            os.kill(pid, signal.SIGSTOP)  # nobody can decode anything now
            again = await one(service, source(PNG))
            os.kill(pid, signal.SIGCONT)
            assert again.processed is None
            assert again.item == msgspec.structs.replace(first.item, features=None)
            stats = service.stats()
            assert (stats["jobs_total"], stats["index_hits_total"], stats["index_misses_total"]) == (1, 1, 1)

            made = await service.materialize(again)
            assert made.item.pixel_digest == first.item.pixel_digest
            views = [service.pool.arena.view(i.features) for i in (first.item, made.item)]
            np.testing.assert_array_equal(*views)
            assert service.stats()["jobs_total"] == 2
            made.lease.release()
            first.release()
            first.release()
            again.release()
            assert service.stats()["arena_bytes"] == 0

    run(scenario)


def test_the_text_of_a_repeated_image_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def decode(url: str, max_bytes: int) -> bytearray:
        decoded.append(url)
        return decode_data_url(url, max_bytes)

    async def scenario() -> None:
        async with running() as service:
            first = await resolve(service, PNG)
            again = await resolve(service, PNG)
            assert again.data is None
            assert again.item == msgspec.structs.replace(first.item, features=None)
            assert len(decoded) == 1
            stats = service.stats()
            assert (stats["sources_total"], stats["source_bytes_total"]) == (2, 2 * len(PNG))

            other = await resolve(service, PNG, max_pixels=1024)  # the same text, other features
            assert len(decoded) == 2
            assert other.item.pixel_digest != first.item.pixel_digest
            longer = PNG + b"!"  # text that differs in the last letters
            assert (await resolve(service, longer)).item.bytes_digest != first.item.bytes_digest
            assert len(decoded) == 3

            made = await service.materialize(again)
            assert len(decoded) == 4
            assert made.item.pixel_digest == first.item.pixel_digest
            made.lease.release()

    monkeypatch.setattr(fetch, "decode_data_url", decode)
    run(scenario)


def test_what_the_index_has_forgotten_is_decoded_again() -> None:
    async def scenario() -> None:
        async with running() as service:
            await resolve(service, PNG)
            service.index.clear()
            again = await resolve(service, PNG)
            assert again.data is not None
            assert service.stats()["jobs_total"] == 2

    run(scenario)


def test_equal_content_over_different_ways_has_one_identity() -> None:
    async def scenario() -> None:
        async with running() as service, serving() as server:
            server.pages["/a"] = [answer(PNG)]
            server.pages["/b?x=1"] = [answer(PNG)]
            urls = [
                data_url(PNG),
                data_url(PNG, "image/jpeg;charset=x"),
                server.url("/a"),
                server.url("/b?x=1"),
            ]
            items = []
            for url in urls:
                resolved = await one(service, MediaSource("image", url))
                items.append(msgspec.structs.replace(resolved.item, features=None))
                resolved.release()
            assert items.count(items[0]) == len(urls)
            assert service.counters.jobs_total == 1

    run(scenario)


def test_options_and_spec_are_part_of_the_identity() -> None:
    async def scenario() -> None:
        async with running() as service:
            data = encode(noise(64, 64))
            full = await resolve(service, data)
            small = await resolve(service, data, max_pixels=1024)
            assert small.item.bytes_digest != full.item.bytes_digest
            assert small.item.pixel_digest != full.item.pixel_digest
            assert small.item.num_tokens < full.item.num_tokens
            same = await resolve(service, data, detail="high")  # the same budget: the same features
            assert same.item.bytes_digest == full.item.bytes_digest
            for change in ({"alpha": "drop"}, {"image_mean": (0.0, 0.0, 0.0)}, {"patch_size": 8}):
                spec = msgspec.structs.replace(TINY, **change)
                other = await one(service, source(data), spec)
                other.release()
                assert other.item.bytes_digest != full.item.bytes_digest
            lowered = await one(service, source(data), auto_max_pixels=1024)
            assert lowered.item.bytes_digest == small.item.bytes_digest
            assert lowered.processed is None

    run(scenario)


def test_arrays_of_equal_bytes_and_different_shape_differ() -> None:
    async def scenario() -> None:
        values = np.arange(24 * 32 * 3, dtype=np.uint32).astype(np.uint8)
        shapes = ((24, 32, 3), (32, 24, 3))
        async with running() as service:
            wide, tall = [await resolve(service, encode(values.reshape(shape))) for shape in shapes]
            assert wide.item.bytes_digest != tall.item.bytes_digest
            assert wide.item.pixel_digest != tall.item.pixel_digest

    run(scenario)


def _with_exif_uuid(jpeg: bytes, uuid: str) -> bytes:
    exif = Image.Exif()
    exif[0xA420] = uuid  # ImageUniqueID
    block = exif.tobytes()
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + jpeg[2:]


def test_a_shared_head_or_a_claimed_id_identifies_nothing() -> None:
    async def scenario() -> None:
        async with running() as service:
            uuid = "0123456789abcdef0123456789abcdef"
            jpegs = [_with_exif_uuid(encode(picture(64, 64, seed=s), "JPEG"), uuid) for s in (1, 2)]
            assert jpegs[0][:500] == jpegs[1][:500]
            one, two = [await resolve(service, data) for data in jpegs]
            assert one.item.pixel_digest != two.item.pixel_digest
            assert one.item.bytes_digest != two.item.bytes_digest
            # One byte at the very end is enough for another bytes_digest; the pixels stay the same.
            longer = await resolve(service, jpegs[0] + b"\0")
            assert longer.item.bytes_digest != one.item.bytes_digest
            assert longer.item.pixel_digest == one.item.pixel_digest

    run(scenario)


def test_options_cannot_be_forged_by_longer_content() -> None:
    """Decoders ignore bytes after the end: the options must not be a mere suffix of what is hashed."""
    digester = Digester(secret=b"s" * 16)
    for algorithm in ("xxh3", "sha256"):
        digester = Digester(secret=b"s" * 16, algorithm=algorithm)
        assert digester.of_bytes(PNG, "cap=504") != digester.of_bytes(PNG + b"cap=504", "")
        assert digester.of_bytes(PNG, "cap=504") != digester.of_bytes(
            PNG[:-1], PNG[-1:].decode("latin-1") + "cap=504"
        )
        assert digester.of_bytes(PNG) != Digester.random(algorithm).of_bytes(PNG)


def test_equal_items_in_flight_share_one_job() -> None:
    async def scenario() -> None:
        async with running() as service:
            (pid,) = service.pool.worker_pids()
            os.kill(pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(one(service, source(PNG))) for _ in range(6)]
            await until(lambda: service.counters.shared_jobs_total == 5)
            for task in tasks[:2]:  # some lose interest; the job goes on for the others
                task.cancel()
            await asyncio.wait(tasks[:2])
            os.kill(pid, signal.SIGCONT)
            resolved = await asyncio.gather(*tasks[2:])
            assert service.counters.jobs_total == 1
            places = {r.item.features for r in resolved}
            assert len(places) == 1
            for r in resolved:
                assert service.pool.arena.allocated_bytes > 0
                r.release()
            assert service.pool.arena.allocated_bytes == 0

    run(scenario)


def test_a_large_picture_that_comes_several_times_at_once_is_decoded_from_base64_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = encode(noise(480, 320))
    texts: list[str] = []
    started, release = threading.Event(), threading.Event()

    def watched(url: str, max_bytes: int) -> bytearray:
        texts.append(url)
        started.set()
        assert release.wait(60)
        return decode_data_url(url, max_bytes)

    monkeypatch.setattr(fetch, "decode_data_url", watched)
    monkeypatch.setattr(fetch, "decode_quickly", lambda url, max_bytes: None)

    async def scenario() -> None:
        async with running() as service:
            tasks = [asyncio.create_task(one(service, source(large))) for _ in range(5)]
            assert await asyncio.to_thread(started.wait, 60)
            for task in tasks[:2]:  # the first of them is who has asked
                task.cancel()
            await asyncio.gather(*tasks[:2], return_exceptions=True)
            release.set()
            resolved = await asyncio.gather(*tasks[2:])
            assert len({media.item.pixel_digest for media in resolved}) == 1
            assert len(texts) == 1
            for media in resolved:
                media.release()
            other = asyncio.create_task(one(service, source(encode(noise(480, 321)))))
            await until(lambda: len(texts) == 2)
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    assert len(data_url(large)) > fetch.INLINE_BYTES
    run(scenario)


def test_a_large_text_that_is_no_base64_is_refused_for_each_caller() -> None:
    url = "data:image/png;base64," + "A" * (1 << 18) + "!"

    async def scenario() -> None:
        async with running() as service:
            sources = [MediaSource("image", url, MediaOptions(), f"messages[{index}]") for index in range(3)]
            outcomes = await asyncio.gather(*(one(service, s) for s in sources), return_exceptions=True)
            assert [getattr(outcome, "param", None) for outcome in outcomes] == [s.param for s in sources]

    run(scenario)


def test_when_every_caller_leaves_the_shared_job_ends() -> None:
    async def scenario() -> None:
        async with running(cancel_grace_s=0.05) as service:
            (pid,) = service.pool.worker_pids()
            os.kill(pid, signal.SIGSTOP)
            tasks = [asyncio.create_task(one(service, source(PNG))) for _ in range(3)]
            await until(lambda: service.counters.shared_jobs_total == 2)
            (flight,) = service._flights.values()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert not service._flights
            await asyncio.wait({flight.task}, timeout=5)
            assert flight.task.cancelled()
            await until(lambda: service.pool.worker_pids() not in ([], [pid]))
            (await one(service, source(PNG))).release()
            assert service.pool.arena.allocated_bytes == 0

    run(scenario)


def test_a_shared_failure_names_each_callers_part() -> None:
    async def scenario() -> None:
        async with running() as service:
            bad = PNG[:-40]
            params = [f"messages[{i}].content[1]" for i in range(3)]
            outcomes = await asyncio.gather(
                *(one(service, source(bad, param)) for param in params), return_exceptions=True
            )
            assert all(isinstance(outcome, MediaDecodeError) for outcome in outcomes)
            assert [outcome.param for outcome in outcomes] == params
            assert service.counters.jobs_total == 1
            assert len(service.index) == 0

    run(scenario)


def test_refusals_carry_the_parameter() -> None:
    async def scenario() -> None:
        async with running() as service:
            part = "messages[2].content[1]"
            with pytest.raises(
                BadRequest, match=r"^`messages\[2\]\.content\[1\]\.max_pixels` must"
            ) as caught:
                await one(service, source(PNG, part, max_pixels=1))
            assert caught.value.param == f"{part}.max_pixels"
            with pytest.raises(MediaFetchError) as caught:
                await one(service, MediaSource("image", "file:///x", param="messages[3]"))
            assert caught.value.param == "messages[3]"
            with pytest.raises(MediaError, match="video"):
                await one(service, MediaSource("video", data_url(PNG)))
            wide = encode(Image.new("RGB", (1093, 5)))
            with pytest.raises(BadRequest, match="aspect ratio"):
                await one(service, source(wide))

    run(scenario)


def test_the_loop_stays_free_while_items_are_hashed_and_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        threads: list[int] = []
        of_bytes = Digester.of_bytes

        def recording(self: Digester, data: bytes, options: str = "") -> bytes:
            threads.append(threading.get_ident())
            return of_bytes(self, data, options)

        monkeypatch.setattr(Digester, "of_bytes", recording)
        async with running(num_workers=2, arena_bytes=4 << 20) as service:
            (await one(service, source(PNG))).release()
            assert threads == [threading.get_ident()]
            images = [encode(noise(640, 640, seed=s)) for s in range(8)]
            turns = 0
            tasks = [asyncio.create_task(one(service, source(data))) for data in images]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                turns += 1
            for task in tasks:
                task.result().release()
            assert threading.get_ident() not in threads[1:]
            assert turns > 100

    run(scenario)


def test_the_index_is_a_bounded_lru() -> None:
    def item(number: int) -> MediaItem:
        digest = number.to_bytes(16, "big")
        return MediaItem(
            modality="image",
            bytes_digest=digest,
            pixel_digest=digest,
            num_tokens=1,
            grid_thw=(1, 2, 2),
            source_size=(1, 1),
        )

    index = MediaIndex(3)
    for number in range(3):
        index.put((item(number),))
    assert index.get(item(0).bytes_digest) == (item(0),)
    index.put((item(3),))
    assert len(index) == 3
    assert index.get(item(1).bytes_digest) is None
    assert index.get(item(0).bytes_digest) is not None
    index.clear()
    assert len(index) == 0
