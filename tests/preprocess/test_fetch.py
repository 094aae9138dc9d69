"""Sources: what is accepted, what is refused with a hint, and that no address or path escapes the guard."""

from __future__ import annotations

import asyncio
import base64
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from contracts.errors import MediaError, MediaFetchError, MediaTooLarge, TooManyRequests
from contracts.media import MediaSource
from contracts.specs import MediaLimits
from preprocess import data_url as data_url_module
from preprocess import fetch as fetch_module
from preprocess.addresses import is_public
from preprocess.data_url import _SLICE_CHARS, decode_data_url
from preprocess.fetch import Fetcher
from tests.preprocess.http_server import HANG, ScriptedServer, answer, serving
from tests.preprocess.samples import data_url, encode, noise
from tests.rounds import run_watched, until

PNG = encode(noise(16, 16))
PAYLOAD = base64.b64encode(PNG).decode()
OPEN = MediaLimits(allow_private_addresses=True, fetch_timeout_s=60)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_watched(scenario, timeout_s=120)


async def fetch(url: str, limits: MediaLimits = OPEN, **options: object) -> bytes:
    async with Fetcher(limits, **options) as fetcher:
        return bytes(await fetcher.fetch(MediaSource("image", url)))


def refusal(url: str, limits: MediaLimits = OPEN, **options: object) -> MediaError:
    async def attempt() -> None:
        async with asyncio.timeout(120):
            await fetch(url, limits, **options)

    with pytest.raises(MediaError) as caught:
        asyncio.run(attempt())
    assert caught.value.status == 400
    assert len(caught.value.message) < 200
    return caught.value


# --- data URLs ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PAYLOAD}",
        f"data:image/jpeg;charset=utf-8;base64,{PAYLOAD}",
        f"data:image/png;name=a.png;charset=utf-8;base64,{PAYLOAD}",
        f"DATA:image/png;BASE64,{PAYLOAD}",
        f"data:;Base64,{PAYLOAD}",
        f"data:application/octet-stream; base64 ,{PAYLOAD}",
        f"data:image/png;base64,{PAYLOAD.rstrip('=')}",
        f"data:image/png;base64,{PAYLOAD}==",
        "data:image/png;base64," + "\r\n".join(PAYLOAD[i : i + 76] for i in range(0, len(PAYLOAD), 76)),
        "data:image/png;base64, " + " ".join(PAYLOAD),
        "data:image/png;base64," + PAYLOAD.replace("+", "-").replace("/", "_"),
        "data:image/png;base64," + PAYLOAD.replace("+", "%2B").replace("=", "%3D"),
        f" data:image/png;base64,{PAYLOAD}\n",
    ],
)
def test_data_urls_are_read_generously(url: str) -> None:
    assert asyncio.run(fetch(url)) == PNG


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("data:image/png,abc", "base64"),
        ("data:,abc", "base64"),
        ("data:image/png;base64", "no comma"),
        ("data:", "no comma"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,  \n", "empty"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,AAAAA", "not valid base64"),
        ("data:image/png;base64,AA==BBBB", "not valid base64"),
        ("data:image/png;base64,AAAA====BBBB", "not valid base64"),
        ("data:image/png;base64,ÄÄÄÄ", "not valid base64"),
        (PAYLOAD, "bare base64"),
        ("/9j/" + PAYLOAD, "bare base64"),
        (PAYLOAD.replace("+", "-").replace("/", "_"), "bare base64"),
        (PAYLOAD[:76] + "\n" + PAYLOAD[76:], "bare base64"),
        ("", "empty"),
        ("/etc/hostname", "file paths are not accepted"),
        ("./x", "file paths are not accepted"),
        ("x.png", "file paths are not accepted"),
        ("C:\\x", "unsupported URL scheme"),
        ("ftp://example.com/a.png", "unsupported URL scheme 'ftp'"),
        ("gopher://127.0.0.1/", "unsupported URL scheme 'gopher'"),
        ("file:/etc/hostname", "file: URLs are off"),
        ("file:///etc/hostname", "file: URLs are off"),
        ("http://", "malformed URL"),
        ("http:///path", "malformed URL"),
        ("https://[::1", "malformed URL"),
    ],
)
def test_what_cannot_be_read_is_a_400_with_a_hint(url: str, hint: str) -> None:
    assert hint in refusal(url).message


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 9])
def test_slices_of_a_large_payload_join_without_a_seam(length: int) -> None:
    data = bytes(range(256)) * (3 * _SLICE_CHARS // 4 // 256) + b"tail-of-it"[:length]
    assert decode_data_url(data_url(data), len(data)) == data
    spaced = data_url(data).replace("AAEC", "AA EC\n")
    assert decode_data_url(spaced, len(data)) == data
    with pytest.raises(MediaTooLarge):
        decode_data_url(data_url(data), len(data) - 1)


def test_padding_inside_a_large_payload_is_refused() -> None:
    url = data_url(b"x" * _SLICE_CHARS)
    for cut in (_SLICE_CHARS // 2, _SLICE_CHARS + 22):
        with pytest.raises(MediaError, match="not valid base64"):
            decode_data_url(url[:cut] + "=" + url[cut:], 10 * _SLICE_CHARS)
    with pytest.raises(MediaError, match="not valid base64"):  # padding that ends a slice, then more
        decode_data_url("data:;base64," + "A" * (_SLICE_CHARS - 2) + "==" + "BBBB", 10 * _SLICE_CHARS)


def test_no_message_holds_any_of_the_payload() -> None:
    secret = "c2VjcmV0" * (2 << 20)  # 16 MiB
    for url in (f"data:image/png;base64,{secret}!", f"data:image/png,{secret}", secret, "x" * 100 + secret):
        assert "c2Vjcm" not in refusal(url).message


def test_large_payloads_are_decoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop_thread, threads = threading.get_ident(), []
        decode, started, release = fetch_module.decode_data_url, threading.Event(), threading.Event()

        def recording(url: str, max_bytes: int) -> bytearray:
            threads.append(threading.get_ident())
            if threads[-1] != loop_thread:
                started.set()
                assert release.wait(60)
            return decode(url, max_bytes)

        monkeypatch.setattr(fetch_module, "decode_data_url", recording)
        large = asyncio.create_task(fetch(data_url(b"x" * (1 << 20))))
        assert await asyncio.to_thread(started.wait, 60)
        assert await fetch(data_url(PNG)) == PNG  # the loop goes on while the large one is stuck
        release.set()
        assert len(await large) == 1 << 20
        assert threads[0] != loop_thread
        assert threads[1] == loop_thread

    run(scenario)


def test_payloads_that_come_together_are_decoded_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once they would hold each other up, so that the first was there with the last."""

    async def scenario() -> None:
        decode, lock, release = fetch_module.decode_data_url, threading.Lock(), threading.Event()
        order: list[int] = []
        running, most = 0, 0

        def recording(url: str, max_bytes: int) -> bytearray:
            nonlocal running, most
            with lock:
                running, most = running + 1, max(most, running + 1)
                order.append(len(url))
                if len(order) == fetch_module.DECODING_THREADS:
                    release.set()
            assert release.wait(60)
            decoded = decode(url, max_bytes)
            with lock:
                running -= 1
            return decoded

        monkeypatch.setattr(fetch_module, "decode_data_url", recording)
        monkeypatch.setattr(fetch_module, "decode_quickly", lambda url, max_bytes: None)
        async with Fetcher(MediaLimits()) as fetcher:
            sizes = [(1 << 18) + 3 * index for index in range(8)]
            sources = [MediaSource("image", data_url(b"x" * size)) for size in sizes]
            results = await asyncio.gather(*map(fetcher.fetch, sources))
        assert [len(data) for data in results] == sizes
        assert most == fetch_module.DECODING_THREADS
        assert sorted(order) == sorted(len(source.url) for source in sources)

    run(scenario)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 4096])
def test_plain_base64_gives_what_the_careful_way_gives(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    url, limit = data_url(data[:size]), size
    plain = data_url_module._decode_plain(url, url.index(",") + 1, limit)
    assert plain == data_url_module._decode_base64(url, url.index(",") + 1, limit) == data[:size]
    for odd in (url + "\n", url[:-1] + "-", url.replace(",", ", "), url + "é", url + "A=AA"):
        assert data_url_module._decode_plain(odd, odd.index(",") + 1, 2 * limit) is None
    assert data_url_module._decode_plain(url, url.index(",") + 1, limit - 1) is None


# --- http(s) ------------------------------------------------------------------------------------------------
def test_a_url_is_fetched_with_a_user_agent_and_its_host() -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.pages["/a.png?token=1"] = [answer(PNG)]
            assert await fetch(server.url("/a.png?token=1")) == PNG
            (request,) = server.requests
            assert f"Host: 127.0.0.1:{server.port}\r\n" in request
            assert "User-Agent: omnistage" in request
            assert "Accept-Encoding: identity" in request

    run(scenario)


def test_the_connection_goes_to_the_resolved_address_under_the_given_name() -> None:
    async def scenario() -> None:
        asked: list[tuple[str, int]] = []

        async def resolver(host: str, port: int) -> list[str]:
            asked.append((host, port))
            return ["127.0.0.1"]

        async with serving() as server:
            server.pages["/x"] = [answer(PNG)]
            assert await fetch(server.url("/x", "bücher.test"), resolver=resolver) == PNG
            assert asked == [("xn--bcher-kva.test", server.port)]
            assert f"Host: xn--bcher-kva.test:{server.port}\r\n" in server.requests[0]

    run(scenario)


async def refused(server: ScriptedServer, path: str, limits: MediaLimits = OPEN) -> MediaError:
    with pytest.raises(MediaError) as caught:
        await fetch(server.url(path), limits)
    assert caught.value.status == 400
    assert "127.0.0.1" in caught.value.message
    assert "token" not in caught.value.message
    assert len(caught.value.message) < 200
    return caught.value


def test_failures_of_the_other_side_name_host_and_status() -> None:
    async def scenario() -> None:
        async with serving() as server:
            for status in ("404 Not Found", "403 Forbidden", "500 Oops", "204 No Content"):
                server.pages["/?token=1"] = [answer(b"", status)]
                assert status[:3] in (await refused(server, "/?token=1")).message
            server.pages["/empty"] = [answer(b"")]
            assert "empty" in (await refused(server, "/empty")).message
            server.pages["/hang"] = [HANG]
            hasty = MediaLimits(allow_private_addresses=True, fetch_timeout_s=0.1)
            assert "within 0.1 s" in (await refused(server, "/hang", hasty)).message
            server.pages["/zip"] = [answer(PNG, Content_Encoding="gzip")]
            assert "compressed" in (await refused(server, "/zip")).message

    run(scenario)


def test_a_broken_transfer_is_tried_once_more() -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.pages["/flaky"] = [answer(PNG)[:-20], answer(PNG)]
            assert await fetch(server.url("/flaky")) == PNG
            server.pages["/broken"] = [answer(PNG)[:-20]]
            await refused(server, "/broken")
            assert len(server.requests) == 4
            server.pages["/404"] = [answer(b"", "404 Not Found"), answer(PNG)]
            await refused(server, "/404")  # an answer is an answer
            assert len(server.requests) == 5
        assert "failed: no connection could be made" in (await refused(server, "/closed")).message

    run(scenario)


def test_the_byte_limit_holds_declared_or_not() -> None:
    async def scenario() -> None:
        limits = MediaLimits(allow_private_addresses=True, max_item_bytes=1000)
        async with serving() as server:
            server.pages["/declared"] = [answer(b"x" * 1001)]
            server.pages["/chunked"] = [
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"190\r\n" + b"x" * 400 + b"\r\n"
                b"190\r\n" + b"x" * 400 + b"\r\n" + b"190\r\n" + b"x" * 400 + b"\r\n"
            ]
            server.pages["/exact"] = [answer(b"x" * 1000)]
            for path in ("/declared", "/chunked"):
                assert isinstance(await refused(server, path, limits), MediaTooLarge)
            assert len(await fetch(server.url("/exact"), limits)) == 1000

    run(scenario)


def test_redirects_are_followed_counted_and_checked() -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.pages["/3"] = [answer(b"", "302 Found", Location="/2")]
            server.pages["/2"] = [answer(b"", "307 Temporary Redirect", Location=server.url("/1"))]
            server.pages["/1"] = [answer(b"", "301 Moved", Location="/ok")]
            server.pages["/ok"] = [answer(PNG)]
            assert await fetch(server.url("/3")) == PNG
            server.pages["/4"] = [answer(b"", "308 Permanent Redirect", Location="/3")]
            assert "more than 3" in (await refused(server, "/4")).message
            for location in ("file:///etc/hostname", "ftp://x/", "http://", ""):
                server.pages["/away"] = [answer(b"", "302 Found", Location=location)]
                with pytest.raises(MediaFetchError):
                    await fetch(server.url("/away"))

    run(scenario)


PRIVATE_HOSTS = [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "[::1]", "[::]",
    "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[fe80::1]", "[fc00::1]", "[ff02::1]", "localhost",
]  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_private_addresses_are_refused_before_connecting(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_connection(*arguments: object, **options: object) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr("socket.socket.connect", no_connection)
    message = refusal(f"http://{host}:1/", MediaLimits()).message
    assert "non-public address" in message or "cannot be resolved" in message


def test_a_name_that_resolves_to_a_private_address_is_refused() -> None:
    for answers in (["10.0.0.7"], ["93.184.216.34", "10.0.0.7"], ["::ffff:192.168.0.1"], ["64:ff9b::a00:1"]):

        async def resolver(host: str, port: int, answers: list[str] = answers) -> list[str]:
            return answers

        assert "non-public" in refusal("http://innocent.test/", MediaLimits(), resolver=resolver).message


def test_a_redirect_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hop stands for a public host: only it is let through the guard."""

    async def scenario() -> None:
        async def resolver(host: str, port: int) -> list[str]:
            return ["127.0.0.1"] if host == "public.test" else ["169.254.169.254"]

        monkeypatch.setattr("preprocess.http_fetch.is_public", lambda a: a == "127.0.0.1" or is_public(a))
        async with serving() as server:
            server.pages["/"] = [answer(b"", "302 Found", Location="http://metadata.test/secret")]
            with pytest.raises(MediaFetchError, match=r"metadata\.test"):
                await fetch(server.url("/", "public.test"), MediaLimits(), resolver=resolver)
            assert len(server.requests) == 1

    run(scenario)


def test_names_are_resolved_once_per_hop() -> None:
    """A second answer (DNS rebinding) is never asked for: the connection uses the checked one."""

    async def scenario() -> None:
        answers = [["127.0.0.1"], ["192.0.2.1"]]

        async def resolver(host: str, port: int) -> list[str]:
            return answers.pop(0)

        async with serving() as server:
            server.pages["/"] = [answer(PNG)]
            assert await fetch(server.url("/", "rebinding.test"), resolver=resolver) == PNG
        assert len(answers) == 1

    run(scenario)


def test_environment_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        async with serving() as server:
            server.pages["/"] = [answer(PNG)]
            assert await fetch(server.url("/")) == PNG

    run(scenario)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    ["2002:7f00:1::", "2001:0:0:0:0:0:80ff:fffe", "fec0::1", "64:ff9b::7f00:1", "::7f00:1", "fe80::1%eth0"],
)
def test_addresses_that_only_look_public(address: str) -> None:
    assert not is_public(address)


def test_sources_in_progress_are_bounded() -> None:
    async def scenario() -> None:
        async with serving() as server, Fetcher(OPEN, max_concurrent=2) as fetcher:
            server.pages["/hang"] = [HANG]
            stuck = [
                asyncio.create_task(fetcher.fetch(MediaSource("image", server.url("/hang"))))
                for _ in range(2)
            ]
            await until(lambda: len(server.requests) == 2)
            with pytest.raises(TooManyRequests) as caught:
                await fetcher.fetch(MediaSource("image", data_url(PNG)))
            assert caught.value.retry_after_s is not None
            for task in stuck:
                task.cancel()
            await asyncio.wait(stuck)
            assert await fetcher.fetch(MediaSource("image", data_url(PNG))) == PNG

    run(scenario)


# --- files --------------------------------------------------------------------------------------------------
def test_files_under_the_media_root_only(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    (root / "a b.png").write_bytes(PNG)
    (root / "link.png").symlink_to(root / "a b.png")
    (outside / "secret.png").write_bytes(PNG)
    (root / "escape.png").symlink_to(outside / "secret.png")
    (root / "escape").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "x.png").write_bytes(PNG)
    limits = MediaLimits(media_root=str(root), max_item_bytes=len(PNG))

    for good in (
        f"file://{root}/a%20b.png",
        f"file://localhost{root}/link.png",
        f"FILE://{root}/sub/../a b.png",
    ):
        assert asyncio.run(fetch(good, limits)) == PNG
    for bad in (
        f"file://{outside}/secret.png", f"file://{root}/escape.png", f"file://{root}/escape/secret.png",
        f"file://{root}/../outside/secret.png", f"file://{root}/%2e%2e/outside/secret.png",
        f"file://{tmp_path}/root2/x.png", f"file://{root}/missing.png", f"file://{root}/sub",
        f"file://{root}/pipe", f"file://{root}/loop", f"file:{root}/a b.png", f"file://host{root}/a b.png",
        f"file://{root}/a%00.png", "file://", "file:///dev/zero", f"file://{root}/{'x' * 300}",
    ):  # fmt: skip
        error = refusal(bad, limits)
        assert isinstance(error, MediaFetchError), bad
        assert str(tmp_path) not in error.message
    (root / "large.png").write_bytes(PNG + b"x")
    assert isinstance(refusal(f"file://{root}/large.png", limits), MediaTooLarge)
