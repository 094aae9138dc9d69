"""Words without a picture, and what the language model says to them: `make_plain_talk` made them.

Conversations about pictures turn to such words at times, and a picture that was shown before is to change
nothing in the answer.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from training.seeing.vocabulary import Split

KEPT = Path(__file__).with_name("plain_talk.json")
EVERY_HELD_OUT = 6


class Said(NamedTuple):
    question: str
    answer: str


@cache
def plain_talk(split: Split) -> tuple[Said, ...]:
    """Every sixth is for evaluation alone."""
    kept = [Said(*pair) for pair in json.loads(KEPT.read_text())]
    held_out = kept[::EVERY_HELD_OUT]
    return tuple(held_out if split == "held_out" else [said for said in kept if said not in held_out])
