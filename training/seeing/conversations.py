"""Conversations about pictures as rows of tokens: ids, positions, what is to be answered.

L is a row's length. A row is filled with turns about its pictures until no further one fits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training.seeing.plain_talk import plain_talk
from training.seeing.questions import Exchange, ask, ask_about_two
from training.seeing.scenes import SPOKEN, Scene
from training.seeing.vocabulary import Split

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SYSTEMS = (DEFAULT_SYSTEM,) * 9 + ("You are a helpful assistant.",)
ROW_LENGTH = 224
MAX_TURNS = 10
SHARE_OF_TALK = 0.2  # of conversations, which turn to something else
TALK_WITHIN = 2  # turns after the first
IGNORED = -100

Ints = npt.NDArray[np.int64]
Grid = tuple[int, int]  # rows and columns of a picture's tokens


class Words:
    """The language model's tokenizer, in the pieces that a chat is made of."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self.encode = lru_cache(200_000)(self._encode)
        self.vision_start, self.vision_end, self.image = (
            self._special(name) for name in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
        )
        self._start, self._end = self._special("<|im_start|>"), self._special("<|im_end|>")
        self.newline = self.encode("\n")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _special(self, name: str) -> int:
        found = self.tokenizer.token_to_id(name)
        assert found is not None, f"the tokenizer has no {name}"
        return int(found)

    def opened(self, role: str) -> tuple[int, ...]:
        return (self._start, *self.encode(f"{role}\n"))

    def closed(self) -> tuple[int, ...]:
        return (self._end, *self.newline)

    @property
    def end(self) -> int:
        return self._end

    def phrase(self, label: str) -> tuple[int, ...]:
        """What a picture is labelled with, as it stands in a text; letters and digits for themselves."""
        return self.encode(label if len(label) == 1 else f" {label}")

    def spoken(self) -> list[int]:
        """Tokens of all that pictures' tokens may say, ascending."""
        return sorted({token for name in SPOKEN for token in self.phrase(name)})

    def answer(self, exchange: Exchange) -> tuple[int, ...]:
        """A word that is read is written in tokens of one letter: what the tower sees are letters."""
        if not exchange.spelled:
            return self.encode(exchange.answer)
        start = (
            exchange.answer.rindex(f'"{exchange.spelled}"') + 1
        )  # the word may occur before its quotes, too
        end = start + len(exchange.spelled)
        letters = (token for letter in exchange.spelled for token in self.encode(letter))
        return (*self.encode(exchange.answer[:start]), *letters, *self.encode(exchange.answer[end:]))


@dataclass
class Row:
    """A conversation under way."""

    words: Words
    grid: Grid
    ids: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)  # the turn whose answer a token belongs to; 0: none
    asked: list[str] = field(default_factory=list)  # of each turn, as in ASKED

    def say(self, ids: tuple[int, ...], turn: int = 0) -> None:
        self.ids += ids
        self.answered += [turn] * len(ids)

    def show(self) -> None:
        """One picture, whose tokens have places like words."""
        rows, columns = self.grid
        words = self.words
        self.say((words.vision_start, *[words.image] * (rows * columns), words.vision_end))

    def exchange(
        self, exchange: Exchange, pictures: int, *, text_first: bool = False, counts: bool = True
    ) -> None:
        """A turn. Its answer `counts`, in training and evaluation, or merely stands there."""
        words = self.words
        if text_first:
            self.say((words._start, *words.encode(f"user\n{exchange.question}")))
        else:
            self.say(words.opened("user"))
        for number in range(1, pictures + 1):
            if pictures > 1:  # as the chat template does
                self.say(words.encode(f"Picture {number}: "))
            self.show()
        if not text_first:
            self.say(words.encode(exchange.question))
        self.say((*words.closed(), *words.opened("assistant")))
        if counts:
            self.asked.append(exchange.asked)
        self.say((*words.answer(exchange), words.end), turn=len(self.asked) if counts else 0)
        self.say(words.newline)

    def cost(self, exchange: Exchange, pictures: int) -> int:
        rows, columns = self.grid
        words = self.words
        chat = len(words.opened("user")) + len(words.opened("assistant")) + 2 * len(words.closed())
        said = len(words.encode(exchange.question)) + len(words.answer(exchange))
        return chat + said + pictures * (rows * columns + 2)


def talk(words: Words, scenes: list[Scene], grid: Grid, rng: random.Random, length: int = ROW_LENGTH) -> Row:
    """A conversation about one picture or two, as long as fits."""
    row = _opening(words, scenes, grid, rng)
    while len(row.ids) > length:
        row = _opening(words, scenes, grid, rng)
    asked: set[str] = set()
    turns_away = len(row.asked) + rng.randrange(TALK_WITHIN) if rng.random() < SHARE_OF_TALK else -1
    while len(row.asked) < MAX_TURNS:
        if len(row.asked) == turns_away:
            more = talk_of_else("train", rng)
        else:
            more = ask(scenes[0], rng) if len(scenes) == 1 else ask_about_two(scenes[0], scenes[1], rng)
        if len(row.ids) + row.cost(more, 0) > length or (more.question in asked and rng.random() < 0.2):
            break
        if more.question not in asked:
            asked.add(more.question)
            row.exchange(more, 0)
    return row


def talk_of_else(split: Split, rng: random.Random) -> Exchange:
    """Words that have nothing to do with a picture, and what the language model says to them without one."""
    said = rng.choice(plain_talk(split))
    return Exchange("talk", said.question, said.answer)


def _opening(words: Words, scenes: list[Scene], grid: Grid, rng: random.Random) -> Row:
    row = Row(words, grid)
    row.say((*words.opened("system"), *words.encode(rng.choice(SYSTEMS)), *words.closed()))
    if len(scenes) == 1:
        row.exchange(ask(scenes[0], rng), 1, text_first=rng.random() < 0.25)
    elif rng.random() < 0.75:
        row.exchange(ask_about_two(scenes[0], scenes[1], rng), 2, text_first=rng.random() < 0.15)
    else:  # one picture after the other: a plain question is about the latest
        for scene in scenes:
            row.exchange(ask(scene, rng), 1)
    return row


def single(
    words: Words, exchange: Exchange, grid: Grid, pictures: int = 1, *, after: Exchange | None = None
) -> Row:
    """One question, as evaluation asks it; `after` another one with the pictures, whose answer is given."""
    row = Row(words, grid)
    row.say((*words.opened("system"), *words.encode(DEFAULT_SYSTEM), *words.closed()))
    if after is not None:
        row.exchange(after, pictures, counts=False)
    row.exchange(exchange, 0 if after is not None else pictures)
    return row
