"""Spoken chat answers of an omni model by `transformers`, over HTTP as a server to measure against.

Run as a program it serves: one request at a time, each answer whole, since `generate` gives nothing before
its
end. Of a request it takes the messages' text, the voice, `max_tokens` and `ignore_eos`; what it gives is
PCM of
16 bits.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.rivals.transformers_serve import READY_LINE, TransformersServe


class TransformersOmni(TransformersServe):
    """`max_frames`: of codec, the most that an answer may have."""

    def __init__(self, model: Path, *, max_frames: int, threads: int | None = None) -> None:
        super().__init__(model)
        self.command = (
            *(sys.executable, "-m", "benchmarks.rivals.transformers_omni", str(model)),
            *("--port", str(self.port), "--max-frames", str(max_frames)),
            *(("--threads", str(threads)) if threads is not None else ()),
        )


class Speaker:
    """Owns model and tokenizer; says one thing at a time."""

    def __init__(self, folder: Path, max_frames: int) -> None:
        import torch
        import transformers

        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        self._torch = torch
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = getattr(transformers, architecture).from_pretrained(folder, dtype="auto").eval()
        self._two_five = hasattr(self._model, "token2wav")
        self._max_frames = max_frames
        self._turn = threading.Lock()

    def say(self, body: dict[str, Any]) -> tuple[str, bytes]:
        """The text and its sound."""
        torch, max_tokens = self._torch, int(body.get("max_tokens") or 64)
        ids = self._tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        # As of 5.24 Qwen2.5-Omni's talker leaves out its start codes unless something is masked.
        ids_1T = torch.tensor([[0] * self._two_five + list(ids)])
        mask_1T = torch.ones_like(ids_1T)
        mask_1T[:, : int(self._two_five)] = 0
        options: dict[str, Any] = {"thinker_do_sample": False, "thinker_max_new_tokens": max_tokens}
        if (voice := body.get("audio", {}).get("voice")) is not None:
            options["speaker"] = voice
        if body.get("ignore_eos"):
            vocab_size = self._model.thinker.config.get_text_config().vocab_size
            options["thinker_eos_token_id"] = vocab_size - 1  # a row of padding, which nothing draws
        frames = self._max_frames + (not self._two_five)
        with self._turn, torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of its own arguments
            tokens_1T, pcm = self._model.generate(
                input_ids=ids_1T, attention_mask=mask_1T, talker_max_new_tokens=frames, **options
            )
        text = self._tokenizer.decode(tokens_1T[0, ids_1T.shape[1] :], skip_special_tokens=True)
        samples = (pcm.reshape(-1).float().clamp(-1, 1) * 32767).round().to(torch.int16)
        return text, samples.numpy().astype("<i2").tobytes()


def _handler(speaker: Speaker, name: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = self.path == "/v1/models"
            self._answer(200 if found else 404, "application/json", json.dumps({"data": [{"id": name}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/v1/chat/completions":
                self._answer(404, "application/json", "{}")
                return
            text, pcm = speaker.say(body)
            audio = {"id": "audio", "data": base64.b64encode(pcm).decode(), "transcript": text}
            deltas = [({"role": "assistant", "content": text, "audio": audio}, None), ({}, "stop")]
            chunks = [
                {"id": "chat", "created": int(time.time()), "model": name, "object": "chat.completion.chunk"}
                | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
                for delta, reason in deltas
            ]
            events = [*map(json.dumps, chunks), "[DONE]"]
            self._answer(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events))

        def _answer(self, status: int, mime: str, content: str) -> None:
            data = content.encode()
            self.send_response(status)
            self.send_header("content-type", mime)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Serves until interrupted.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-frames", type=int, required=True, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch")
    args = parser.parse_args(argv)
    speaker = Speaker(args.model, args.max_frames)
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), _handler(speaker, args.model.name))
    print(READY_LINE, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
