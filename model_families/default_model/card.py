"""The default model's card: what it can do by the weights that it was made of, and how good that is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Scores = Mapping[str, Mapping[str, float | str]]  # by part; see `evaluation.json` in training/README.md

LANGUAGE = """\
- **Language**: SmolLM2-135M-Instruct (Apache-2.0), read from a 4-bit GGUF file and written as bfloat16.
  Not one of its weights was changed: its answers to text are those of that model, short, and often wrong.
"""
BLIND = """\
- **It cannot see.** The vision tower is not trained. Its weights are random, drawn from a fixed seed, and
  scaled so that image embeddings lie among the word embeddings. An image or a video passes through
  resizing, patches, window attention, merging and multi-axis positions as in a trained model, takes as many
  tokens and changes the answer: do not read anything into what it says about a picture or a video.
"""
SEES = """\
- **Sees** drawn things, in one picture or two: colour, shape, number (to five) and place of simple shapes,
  which lies left or right of another, above or below it; printed numbers and single words; common emoji. A
  tower of 12.4M parameters in Qwen2.5-VL's layout, trained from nothing on pictures that a program drew:
  each of its tokens says a word of the language model's, in reading order. With it goes a picture adapter:
  1.9M low-rank weights that are added to the language model's for tokens at and behind the first picture of
  a conversation, and for no others. So what it says where there is no picture is what SmolLM2 says, token
  for token.
  Measured (below) on pictures that the same program drew, in the words that it learned; asked in others it
  may answer wrongly: "Is the circle above the star?" and "What is to the left of the star?" are understood,
  "What is above the star?" is not, nor a choice ("a circle or a square?"), nor "How many are there?" without
  a noun. Wrong most often besides are: things of one colour counted among others, all that there is on
  a picture of several things, words of six letters and more, and print of less than 32 pixels in height. It
  is not made for photographs, of which it says that it does not know or names an emoji: of those, and of
  videos, do not believe it; nor of pictures smaller than a hundred pixels or many times as long as wide. Of
  more than five things it says that they are five or fewer. Text of several words or with signs in it is
  read wrongly. It can still talk of other things after a picture, but mostly in other words than without
  one.
"""
DEAF = "- **It cannot hear**: it takes no sound.\n"
HEARS = """\
- **Hears** English sentences, 30 s at most. Whisper tiny.en's encoder (MIT), its lower half as published, the
  upper half and two more layers trained to spell, on synthetic speech alone, of six voices (of hibari-tts,
  Apache-2.0, Flite and Piper's "joe"); a list of words (of hibari-tts's dictionary), and of which follow
  which (of the language model), correct the spelling, and the language model reads the words as it reads
  text (of silence, noise or a tone: that there are none). `/v1/audio/transcriptions` gives the words
  themselves. It hears no tone of voice and nothing but speech, and stumbles over names and rare words.
"""
DUMB = "- **It does not speak.**\n"
SPEAKS = """\
- **Speaks** English in one voice, "heart": a talker with a code predictor and a causal decoder of
  Qwen3-Omni's kind (16M parameters), trained from nothing on the speech of hibari-tts (Apache-2.0),
  whose dictionary of sounds comes with it. Numbers, dates, measures and money are said in words. In a
  sentence a listener (Whisper tiny.en) mishears one word in ten, in a row of words without grammar every
  other one: single consonants are not always clear, and rare words can only be guessed by what is around
  them.
"""
TITLES = {"seeing": "Seeing", "hearing": "Hearing", "speaking": "Speaking"}


@dataclass(frozen=True)
class Shipped:
    """Which halves there are trained weights for."""

    sees: bool
    hears: bool
    speaks: bool

    @property
    def layout(self) -> str:
        if self.sees or self.hears or self.speaks:
            return "of the family `omnistage_nano` (`OmnistageNanoForConditionalGeneration`)"
        return "in the layout of Qwen2.5-VL (`Qwen2_5_VLForConditionalGeneration`)"


def model_card(name: str, shipped: Shipped, scores: Scores) -> str:
    """Markdown. Says of each half what is true of these weights."""
    parts = [
        f"# {name}\n\nA small checkpoint to run, measure and test a server with, {shipped.layout},"
        " made on this machine by\n`python -m model_families.default_model.build`.\n\n",
        LANGUAGE,
        SEES if shipped.sees else BLIND,
        HEARS if shipped.hears else DEAF,
        SPEAKS if shipped.speaks else DUMB,
    ]
    if scores:
        parts.append(
            "\n## Measured on held-out data\n\nHow: `training/README.md`. Shares, unless a unit is given.\n"
        )
    for part, title in TITLES.items():
        if part in scores:
            lines = [f"| {what} | {value} |\n" for what, value in scores[part].items()]
            parts.append(f"\n| {title} | |\n| --- | --- |\n{''.join(lines)}")
    if not (shipped.sees and shipped.hears and shipped.speaks):
        parts.append("\nFor what it lacks, serve a trained checkpoint of your own.\n")
    return "".join(parts)


def read_scores(path: Path) -> Scores:
    """None yet, none."""
    if not path.exists():
        return {}
    scores: Scores = json.loads(path.read_text())
    assert scores.keys() <= TITLES.keys(), scores.keys()
    return scores
