"""Questions about pictures and their true answers, in a few wordings each; the answers are short and fixed,
and the words before the one that tells are the same whatever it is: not "a" or "an", "is" or "are".

A question's task names what evaluation counts it under.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from training.seeing.palette import COLOURS, SHAPES
from training.seeing.scenes import COUNTS, PLACES, Scene, Thing

TASKS = (
    *("colour", "shape", "count", "position", "presence", "describe", "background"),
    *("number", "word", "text_colour", "emoji", "unknown", "two_pictures", "talk"),
)
# Evaluation tells these apart within a task: "position.where".
KINDS = {
    "count": ("shape", "colour", "all", "none"),
    "position": ("where", "what", "sideways", "upright"),
    "presence": ("shape", "pair"),
    "describe": ("one", "several"),
    "word": ("short", "long"),
    "two_pictures": ("one", "which", "both"),
}
ASKED = tuple(f"{task}.{kind}" if kind else task for task in TASKS for kind in KINDS.get(task, ("",)))
SHORT_WORD = 5  # letters at most
UNKNOWN = "I do not know."
_NUMBERS = ("zero", *COUNTS, "six")


@dataclass(frozen=True)
class Exchange:
    task: str
    question: str
    answer: str
    spelled: str = ""  # the part of the answer that is written letter by letter
    kind: str = ""  # of its task's KINDS

    @property
    def asked(self) -> str:
        return f"{self.task}.{self.kind}" if self.kind else self.task


Asker = Callable[[Scene, random.Random], Exchange | None]


def ask(scene: Scene, rng: random.Random) -> Exchange:
    """A question that the scene can answer, or that nobody can."""
    while True:
        asker, _ = rng.choice(_ASKERS[scene.kind])
        exchange = asker(scene, rng)
        if exchange is not None:
            return exchange


def ask_task(scene: Scene, task: str, rng: random.Random) -> Exchange | None:
    """A question of one task; None when the scene seems to have none."""
    askers = [asker for asker, name in _ASKERS[scene.kind] if name == task]
    tries = (rng.choice(askers)(scene, rng) for _ in range(20)) if askers else ()
    return next((exchange for exchange in tries if exchange is not None and exchange.task == task), None)


def can_ask(kind: str, task: str) -> bool:
    return any(name == task for _, name in _ASKERS[kind])


def describe(scene: Scene) -> str:
    """What is on the picture, as a noun phrase: "one red circle and two blue stars", in reading order."""
    if scene.kind == "nothing":
        return "nothing that I know"
    if scene.emoji is not None:
        return f"the {scene.emoji.name} emoji"
    if scene.kind in ("number", "word"):
        return f"a {scene.kind}"
    groups = Counter((thing.colour, thing.shape) for thing in scene.things)
    return _join([_group(colour, shape, count) for (colour, shape), count in groups.items()])


def _group(colour: str, shape: str, count: int) -> str:
    return f"{_NUMBERS[count]} {colour} {shape if count == 1 else SHAPES[shape]}"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _colour_word(rng: random.Random) -> str:
    return rng.choice(("colour", "color"))


def _unique(scene: Scene, rng: random.Random) -> Thing | None:
    """A thing whose colour and shape together name it."""
    pairs = Counter((thing.colour, thing.shape) for thing in scene.things)
    single = [thing for thing in scene.things if pairs[thing.colour, thing.shape] == 1]
    return rng.choice(single) if single else None


def _name(scene: Scene, thing: Thing, rng: random.Random) -> str:
    """ "circle" where there is one, "red circle" otherwise (or at times)."""
    alone = scene.counted(thing.shape) == 1
    return thing.shape if alone and rng.random() < 0.6 else f"{thing.colour} {thing.shape}"


# --- shapes ---
def _colour(scene: Scene, rng: random.Random) -> Exchange | None:
    shape = rng.choice(scene.things).shape
    colours = {thing.colour for thing in scene.things if thing.shape == shape}
    if len(colours) > 1:
        return None
    colour = colours.pop()
    if scene.counted(shape) > 1:
        name = SHAPES[shape]
        question = rng.choice(
            (f"What {_colour_word(rng)} are the {name}?", f"Which {_colour_word(rng)} do the {name} have?")
        )
        return Exchange("colour", question, f"The {name} are {colour}.")
    wordings = [
        f"What {_colour_word(rng)} is the {shape}?",
        f"Which {_colour_word(rng)} does the {shape} have?",
        f"What is the {_colour_word(rng)} of the {shape}?",
        f"Tell me the {_colour_word(rng)} of the {shape}.",
    ]
    if len(scene.things) == 1:
        wordings += [f"What {_colour_word(rng)} is it?", f"What {_colour_word(rng)} is this?"]
    return Exchange("colour", rng.choice(wordings), f"The {shape} is {colour}.")


def _shape(scene: Scene, rng: random.Random) -> Exchange | None:
    thing = rng.choice(scene.things)
    if sum(other.colour == thing.colour for other in scene.things) > 1:
        return None
    wordings = [
        f"What shape is the {thing.colour} object?",
        f"Which shape is {thing.colour}?",
        f"What is the {thing.colour} thing?",
        f"What shape is {thing.colour}?",
    ]
    if len(scene.things) == 1:
        wordings += ["What shape is this?", "Which shape is in the picture?", "What shape do you see?"]
    return Exchange(
        "shape", rng.choice(wordings), f"The {thing.colour} object is {_article(thing.shape)} {thing.shape}."
    )


def _number_of(count: int, many: str) -> str:
    return f"The number of {many} is {_NUMBERS[count]}."


def _count(scene: Scene, rng: random.Random) -> Exchange | None:
    how = rng.random()
    if how < 0.5:
        shape = max(SHAPES, key=scene.counted) if rng.random() < 0.6 else rng.choice(scene.things).shape
        kind, count, many = "shape", scene.counted(shape), SHAPES[shape]
    elif how < 0.72:
        colour = rng.choice(scene.things).colour
        count = sum(thing.colour == colour for thing in scene.things)
        kind, many = "colour", f"{colour} objects"
    elif how < 0.9:
        kind, count, many = "all", len(scene.things), "objects"
    else:
        shape = rng.choice([name for name in SHAPES if not scene.counted(name)])
        kind, count, many = "none", 0, SHAPES[shape]
    if count > len(COUNTS):
        return None
    question = rng.choice(
        (
            f"How many {many} are there?",
            f"How many {many} are in the picture?",
            f"How many {many} do you see?",
            f"Count the {many}.",
        )
    )
    return Exchange("count", question, _number_of(count, many), kind=kind)


_PREPOSITIONS = {"centre": "in", "left": "on", "right": "on"}  # as people ask


def _where(place: str) -> str:
    return f"at the {place}"


def _position(scene: Scene, rng: random.Random) -> Exchange | None:
    thing = _unique(scene, rng)
    if thing is None:
        return None
    how = rng.random()
    if how < 0.22:
        name = _name(scene, thing, rng)
        question = rng.choice(
            (f"Where is the {name}?", f"Where in the picture is the {name}?", f"Where do you see the {name}?")
        )
        return Exchange("position", question, f"The {name} is {_where(thing.place)}.", kind="where")
    if how < 0.45:
        place = thing.place if rng.random() < 0.8 else rng.choice(PLACES)
        there = [other for other in scene.things if other.place == place]
        if len(there) > 1 or _beside(scene, place):
            return None
        answer = describe(Scene("things", things=tuple(there))) if there else "nothing"
        at = rng.choice((_where(place), f"{_PREPOSITIONS.get(place, 'at')} the {place}"))
        question = rng.choice((f"What is {at}?", f"What do you see {at}?"))
        sentence = _sentence(f"there is {answer} {_where(place)}")
        return Exchange("position", question, sentence, kind="what")
    related = (_relation(scene, thing, rng) for _ in range(6))  # few pairs can be asked about
    return next((exchange for exchange in related if exchange is not None), None)


def _beside(scene: Scene, place: str) -> bool:
    """Whether something else is "on the left" too, in a corner there: the question would be ambiguous."""
    return any(place in thing.place.split() and thing.place != place for thing in scene.things)


_SIDES = {True: ("to the left of", "to the right of"), False: ("above", "below")}  # by whether sideways


def _relation(scene: Scene, thing: Thing, rng: random.Random) -> Exchange | None:
    other = _unique(scene, rng)
    if other is None or other == thing:
        return None
    sideways = rng.random() < 0.6
    (here, there), sides = ((thing.x, other.x) if sideways else (thing.y, other.y)), _SIDES[sideways]
    if abs(there - here) < 0.15 or int(3 * here) == int(3 * there):  # a token says the third, no more
        return None
    name, beside = _name(scene, thing, rng), _name(scene, other, rng)
    side = sides[0] if here < there else sides[1]
    question = f"Is the {name} {rng.choice(sides)} the {beside}?"
    kind = "sideways" if sideways else "upright"
    return Exchange("position", question, f"The {name} is {side} the {beside}.", kind=kind)


def _presence(scene: Scene, rng: random.Random) -> Exchange | None:
    thing = rng.choice(scene.things)
    shape = thing.shape if rng.random() < 0.5 else rng.choice(list(SHAPES))
    if rng.random() < 0.3:
        shape, colour = thing.shape, thing.colour if rng.random() < 0.5 else rng.choice(list(COLOURS))
        there = any((other.colour, other.shape) == (colour, shape) for other in scene.things)
        kind, name = "pair", f"{_article(colour)} {colour} {shape}"
    else:
        kind, there, name = "shape", scene.counted(shape) > 0, f"{_article(shape)} {shape}"
    question = rng.choice((f"Is there {name}?", f"Is there {name} in the picture?", f"Do you see {name}?"))
    return Exchange("presence", question, "Yes." if there else "No.", kind=kind)


def _describe(scene: Scene, rng: random.Random) -> Exchange | None:
    if len({(thing.colour, thing.shape) for thing in scene.things}) > 3:
        return None
    wordings = [
        "What is in the picture?",
        "What is in this picture?",
        "Describe this picture.",
        "What do you see?",
    ]
    wordings += ["Describe the picture in one sentence.", "What does the picture show?", "What is this?"]
    shown = describe(scene)
    if scene.kind == "nothing":
        return Exchange("unknown", rng.choice(wordings), UNKNOWN)
    if scene.text:
        return _text_exchange(scene, rng.choice(wordings))
    if scene.emoji is not None:
        return Exchange("emoji", rng.choice(wordings), f"It is {shown}.")
    kind = "one" if len(scene.things) == 1 else "several"
    return Exchange("describe", rng.choice(wordings), f"The picture shows {shown}.", kind=kind)


def _absent(scene: Scene, rng: random.Random) -> Exchange | None:
    shape = rng.choice([name for name in SHAPES if not scene.counted(name)])
    question = rng.choice((f"What {_colour_word(rng)} is the {shape}?", f"Where is the {shape}?"))
    return Exchange("unknown", question, f"{UNKNOWN} There is no {shape}.")


def _unknowable(scene: Scene, rng: random.Random) -> Exchange | None:
    question = rng.choice(
        (
            *("Who made this picture?", "When was this picture taken?", "Where was this picture taken?"),
            *("Who is the person in the picture?", "What is the name of the man?", "What will happen next?"),
            *(
                "How much does it cost?",
                "What is behind the camera?",
                "Who owns this?",
                "How old is the woman?",
            ),
        )
    )
    return Exchange("unknown", question, UNKNOWN)


def _no_text(scene: Scene, rng: random.Random) -> Exchange | None:
    what = rng.choice(("number", "word"))
    if scene.kind == what:
        return None
    question = rng.choice(
        (f"What {what} is in the picture?", f"What {what} is this?", f"Which {what} is shown?")
    )
    return Exchange("unknown", question, f"{UNKNOWN} There is no {what}.")


def _background(scene: Scene, rng: random.Random) -> Exchange | None:
    if scene.background is None:
        return None
    question = rng.choice(
        (
            f"What {_colour_word(rng)} is the background?",
            f"Which {_colour_word(rng)} does the background have?",
        )
    )
    return Exchange("background", question, f"The background is {scene.background}.")


# --- text and emoji ---
def _text_exchange(scene: Scene, question: str) -> Exchange:
    if scene.kind == "number":
        return Exchange("number", question, f"The number is {scene.text}.")
    kind = "short" if len(scene.text) <= SHORT_WORD else "long"
    return Exchange("word", question, f'The word is "{scene.text}".', spelled=scene.text, kind=kind)


def _read(scene: Scene, rng: random.Random) -> Exchange | None:
    what = scene.kind
    wordings = (
        *(f"What {what} is this?", f"What {what} is in the picture?", f"Which {what} is shown?"),
        *(f"Read the {what}.", "What does it say?", "What is written here?", f"What is the {what}?"),
        *("Read the text.", "What does the picture say?"),
    )
    return _text_exchange(scene, rng.choice(wordings))


def _text_colour(scene: Scene, rng: random.Random) -> Exchange | None:
    name = rng.choice((scene.kind, "text"))
    question = rng.choice(
        (f"What {_colour_word(rng)} is the {name}?", f"What is the {_colour_word(rng)} of the {name}?")
    )
    return Exchange("text_colour", question, f"It is {scene.text_colour}.")


def _which_emoji(scene: Scene, rng: random.Random) -> Exchange | None:
    wordings = (
        "What emoji is this?",
        "Which emoji is this?",
        "What emoji is in the picture?",
        "Name the emoji.",
    )
    return Exchange("emoji", rng.choice(wordings), f"It is {describe(scene)}.")


# --- two pictures ---
def ask_about_two(first: Scene, second: Scene, rng: random.Random) -> Exchange:
    """A question that needs to tell two pictures apart."""
    while True:
        exchange = rng.choice((_in_one, _in_one, _in_one, _which_shows, _difference))(first, second, rng)
        if exchange is not None:
            return exchange


def _in_one(first: Scene, second: Scene, rng: random.Random) -> Exchange | None:
    ordinal, scene = rng.choice((("first", first), ("second", second)))
    inner = ask(scene, rng)
    question = inner.question
    for phrase in (" in the picture", " in this picture", " the picture", " this picture"):
        if phrase in question:
            place = " in" if " in t" in phrase else ""
            question = question.replace(phrase, f"{place} the {ordinal} picture", 1)
            return Exchange("two_pictures", question, inner.answer, inner.spelled, "one")
    question = rng.choice(
        (
            f"In the {ordinal} picture: {question[0].lower()}{question[1:]}",
            f"{question[:-1]} in the {ordinal} picture{question[-1]}",
        )
    )
    return Exchange("two_pictures", question, inner.answer, inner.spelled, "one")


def _which_shows(first: Scene, second: Scene, rng: random.Random) -> Exchange | None:
    for_one = [
        ("first" if one is first else "second", shape)
        for one, other in ((first, second), (second, first))
        for shape in SHAPES
        if one.counted(shape) and not other.counted(shape)
    ]
    for_one += [
        (ordinal, what)
        for ordinal, one, other in (("first", first, second), ("second", second, first))
        for what in ("number", "word", "emoji")
        if one.kind == what and other.kind != what
    ]
    if not for_one:
        return None
    ordinal, what = rng.choice(for_one)
    question = rng.choice(
        (f"Which picture shows {_article(what)} {what}?", f"Which picture has {_article(what)} {what}?")
    )
    return Exchange("two_pictures", question, f"The {ordinal} picture.", kind="which")


def _difference(first: Scene, second: Scene, rng: random.Random) -> Exchange | None:
    shown = describe(first), describe(second)
    if max(len(text) for text in shown) > 45 or shown[0] == shown[1]:
        return None
    question = rng.choice(
        (
            "How do the pictures differ?",
            "What is the difference between the pictures?",
            "Describe both pictures.",
        )
    )
    return Exchange(
        "two_pictures", question, f"The first shows {shown[0]}. The second shows {shown[1]}.", kind="both"
    )


# How often each is asked: repeated entries.
_ASKERS: dict[str, tuple[tuple[Asker, str], ...]] = {
    "things": (
        *[(_colour, "colour")] * 5,
        *[(_shape, "shape")] * 5,
        *[(_count, "count")] * 6,
        *[(_position, "position")] * 18,
        *[(_presence, "presence")] * 4,
        *[(_describe, "describe")] * 4,
        (_absent, "unknown"),
        (_unknowable, "unknown"),
        (_no_text, "unknown"),
        (_background, "background"),
    ),
    "number": (
        *[(_read, "number")] * 6,
        (_describe, "number"),
        (_text_colour, "text_colour"),
        (_no_text, "unknown"),
        (_background, "background"),
        (_unknowable, "unknown"),
    ),
    "word": (
        *[(_read, "word")] * 7,
        (_describe, "word"),
        (_text_colour, "text_colour"),
        (_no_text, "unknown"),
        (_background, "background"),
        (_unknowable, "unknown"),
    ),
    "emoji": (
        *[(_which_emoji, "emoji")] * 4,
        *[(_describe, "emoji")] * 2,
        (_no_text, "unknown"),
        (_background, "background"),
        (_unknowable, "unknown"),
    ),
    "nothing": (
        *[(_describe, "unknown")] * 3,
        *[(_absent, "unknown")] * 2,
        (_no_text, "unknown"),
        (_background, "background"),
        (_unknowable, "unknown"),
    ),
}
