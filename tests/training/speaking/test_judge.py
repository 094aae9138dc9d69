"""The judge of speech: what a server said is counted, what it left unsaid too."""

from __future__ import annotations

import io
import json
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.training.speaking.test_data import KINDS
from training.speaking.sentences import Sentences
from training.speaking.sizes import SAMPLE_RATE
from training.speaking.words import Words

pytest.importorskip("scipy")
from training.speaking.judge import from_server, judge, judged_sets, report

SECONDS = {"one two": 1.0, "three four": 2.0, "five six seven": 30.0}
CUT, MUTE, BROKEN = "eight nine", "ten", "eleven"


class Speaker(BaseHTTPRequestHandler):
    """Says nothing but its length in samples of one value, the request's seed."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["stream"] is False
        if asked["input"] in (MUTE, BROKEN):
            code = "no_speech" if asked["input"] == MUTE else "out_of_order"
            return self.reply(500, json.dumps({"error": {"code": code}}).encode())
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
            samples = int(SECONDS.get(asked["input"], 1.0) * SAMPLE_RATE)
            out.writeframes(np.full(samples, asked["seed"], np.int16).tobytes())
        finish = "length" if asked["input"] == CUT else "stop"
        return self.reply(200, file.getvalue(), finish)

    def reply(self, status: int, body: bytes, finish: str = "") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-omnistage-finish-reason", finish)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Speaker)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_a_server_said_is_counted_and_what_it_left_unsaid_too(url: str) -> None:
    texts = [*SECONDS, CUT, MUTE]
    heard = iter(["one two", "three for", "five six", "eight nine"])
    spoken = list(from_server(url, texts, "m"))
    assert [one.text for one in spoken] == texts
    assert [round(float(one.sound[0]) * 32768) for one in spoken[:-1]] == [0, 1, 2, 3]  # each its own seed
    verdicts = [judge(one, lambda sound: next(heard)) for one in spoken]
    assert [said.errors for said in verdicts] == [0, 1, 1, 0, 1]
    assert report("m", verdicts) == {
        "what": "m", "texts": 5, "words": 10, "missed": 3, "word_error_rate": 0.3,
        "without_a_miss": 2, "endless": 2, "empty": 1, "seconds": 34.0,
    }  # fmt: skip


def test_a_server_that_fails_is_not_taken_for_one_that_is_mute(url: str) -> None:
    with pytest.raises(OSError, match="500"):
        list(from_server(url, [BROKEN], "m"))


def test_sentences_are_judged_apart_from_rows_of_words() -> None:
    sets = judged_sets(
        Sentences(Words(KINDS, KINDS, ("Ada", "Bob"), KINDS, KINDS, KINDS, KINDS, KINDS)), 9, 4
    )
    assert [len(texts) for texts in sets.values()] == [9, 4]
    assert not {*sets["sentences"]} & {*sets["rows of words"]}
