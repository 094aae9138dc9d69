"""What is asked: sessions of turns, their images and texts, fixed by one seed before anything is sent."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from benchmarks.chat.distribution import Numbers, Sizes
from benchmarks.chat.images import EncodedImage, ImageFormat, synthesize
from benchmarks.chat.words import text_of

Reuse = Literal["new", "pool", "window", "one"]
"""new: every image belongs to one session. pool: sessions draw from `pool_size` images. window: as new, but a
request keeps only the last `window` images of its conversation, as agents that watch a screen do. one: a
single image everywhere."""

SYSTEM_WORDS = 16
WORDS_PER_TOKEN = 0.75


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    text: str
    images: tuple[EncodedImage, ...] = ()

    def encode(self) -> bytes:
        if not self.images:
            return msgspec.json.encode({"role": self.role, "content": self.text})
        pieces = [b'{"role":"', self.role.encode(), b'","content":[']
        for image in self.images:
            pieces += [b'{"type":"image_url","image_url":{"url":"', image.data_url, b'"}},']
        pieces += [msgspec.json.encode({"type": "text", "text": self.text}), b"]}"]
        return b"".join(pieces)


@dataclass(frozen=True)
class Turn:
    """`answer` is the assistant's turn in the history of later turns, unless the server's own is used."""

    question: str
    images: tuple[EncodedImage, ...]
    answer: str


@dataclass(frozen=True)
class Session:
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """`window`: how many of a conversation's last images a request keeps; None keeps them all."""

    sessions: tuple[Session, ...]
    warmup: tuple[Session, ...]
    window: int | None = None

    def request(self, session: Session, turn: int, answers: Sequence[str]) -> tuple[Message, ...]:
        """The messages of one turn; `answers` are those given to the turns before it."""
        assert len(answers) >= turn
        messages = [Message("system", session.system)] if session.system else []
        for past, answer in zip(session.turns[:turn], answers, strict=False):
            messages += [Message("user", past.question, past.images), Message("assistant", answer)]
        messages.append(Message("user", session.turns[turn].question, session.turns[turn].images))
        return tuple(messages if self.window is None else _keep_last_images(messages, self.window))

    @property
    def sha256(self) -> str:
        """Over every byte that may be sent; equal for runs that can be compared."""
        digest = hashlib.sha256(str(self.window).encode())
        for session in (*self.warmup, *self.sessions):
            for turn in range(len(session.turns)):
                for message in self.request(session, turn, [past.answer for past in session.turns]):
                    digest.update(message.encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class WorkloadConfig:
    num_sessions: int
    num_warmup: int
    turns: Numbers
    images: Numbers
    """Images per session, spread evenly over its turns with the first one in the first turn."""
    image_size: Sizes
    image_format: ImageFormat
    reuse: Reuse
    pool_size: int
    window: int
    prompt_words: Numbers
    output_tokens: int
    seed: int


def build_workload(config: WorkloadConfig) -> Workload:
    """Warm-up sessions have images and texts of their own: they warm the server, not its caches."""
    system = text_of(random.Random(f"{config.seed}:system"), SYSTEM_WORDS)
    pool = _shared_images(config)
    sessions = tuple(_session(config, system, f"session{i}", pool) for i in range(config.num_sessions))
    warmup = tuple(_session(config, system, f"warmup{i}", ()) for i in range(config.num_warmup))
    return Workload(sessions, warmup, config.window if config.reuse == "window" else None)


def _shared_images(config: WorkloadConfig) -> tuple[EncodedImage, ...]:
    count = {"new": 0, "window": 0, "pool": config.pool_size, "one": 1}[config.reuse]
    rng = random.Random(f"{config.seed}:pool")
    return tuple(_new_image(config, rng) for _ in range(count))


def _new_image(config: WorkloadConfig, rng: random.Random) -> EncodedImage:
    return synthesize(rng.getrandbits(63), config.image_size.draw(rng), config.image_format)


def _session(config: WorkloadConfig, system: str, name: str, pool: Sequence[EncodedImage]) -> Session:
    """Each session has its own generator: how many there are does not change what one says."""
    rng = random.Random(f"{config.seed}:{name}")
    num_turns = config.turns.draw(rng)
    num_images = config.images.draw(rng)
    images: list[list[EncodedImage]] = [[] for _ in range(num_turns)]
    for index in range(num_images):
        image = rng.choice(pool) if pool else _new_image(config, rng)
        images[index * num_turns // num_images].append(image)
    num_answer_words = max(1, round(config.output_tokens * WORDS_PER_TOKEN))
    turns = tuple(
        Turn(text_of(rng, config.prompt_words.draw(rng)), tuple(shown), text_of(rng, num_answer_words))
        for shown in images
    )
    return Session(system, turns)


def _keep_last_images(messages: Sequence[Message], window: int) -> list[Message]:
    kept: list[Message] = []
    room = window
    for message in reversed(messages):
        images = (
            message.images[len(message.images) - room :] if room < len(message.images) else message.images
        )
        room -= len(images)
        kept.append(Message(message.role, message.text, images))
    return kept[::-1]
