"""The default model's answers about pictures are true, and of the right picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont

from model_families.default_model.shipped import SEEING
from tests.conftest import nothing_left_behind
from tests.served import Served
from tests.tiny_models import reference_tokenizer

Box = tuple[int, int, int, int]
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not SEEING.exists(), reason="no trained tower is shipped (training/README.md)"),
]

MIDDLE = (90, 50, 230, 190)
CORNERS = {
    "top left": (20, 15, 90, 85),
    "top right": (230, 15, 300, 85),
    "bottom left": (20, 155, 90, 225),
    "bottom right": (230, 155, 300, 225),
    "centre": (125, 85, 195, 155),
}
EDGES = {
    "left": (20, 85, 90, 155),
    "right": (230, 85, 300, 155),
    "top": (125, 15, 195, 85),
    "bottom": (125, 155, 195, 225),
}
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "black", "pink")
NUMBERS = ("one", "two", "three", "four", "five")


def shapes(*things: tuple[str, str, Box], background: str = "white") -> Image.Image:
    image = Image.new("RGB", (320, 240), background)
    draw = ImageDraw.Draw(image)
    for colour, kind, box in things:
        (draw.ellipse if kind == "circle" else draw.rectangle)(box, fill=colour)
    return image


def shape(colour: str, kind: str, background: str = "white") -> Image.Image:
    return shapes((colour, kind, MIDDLE), background=background)


def shows(name: str) -> str:
    """What is said of a picture of one thing."""
    return f"The picture shows one {name}."


def printed(text: str) -> Image.Image:
    image = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(image).text((60, 80), text, fill="black", font=ImageFont.load_default(72))
    return image


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """The server here serves several tests."""
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def served(default_model: Path) -> Iterator[Served]:
    with Served(default_model, "thinker.kv_memory=512MiB") as served:
        yield served
        served.assert_clean()


@pytest.fixture(scope="module")
def ask(served: Served, default_model: Path):
    tokenizer = reference_tokenizer(default_model)

    def answers(*questions) -> list[str]:
        found = served.ask_all(list(questions), max_tokens=24)
        return [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in found]

    return answers


def test_the_same_question_at_once_about_different_pictures(ask) -> None:
    shown = [(colour, kind) for colour in ("red", "blue", "green") for kind in ("circle", "square")]
    questions = [[("user", [shape(*pair), "What is in the picture?"])] for pair in shown * 2]
    assert ask(*questions) == [shows(f"{colour} {kind}") for colour, kind in shown * 2]


def test_colours_are_named(ask) -> None:
    answers = ask(*[[("user", [shape(one, "circle"), "What colour is the circle?"])] for one in COLOURS])
    assert answers == [f"The circle is {colour}." for colour in COLOURS]


@pytest.mark.parametrize("background", ["white", "navy"])
def test_shapes_are_named(ask, background: str) -> None:
    shown = [(colour, kind) for colour in ("red", "green") for kind in ("circle", "square")]
    answers = ask(*[[("user", [shape(*pair, background), "What shape is this?"])] for pair in shown])
    assert answers == [f"The {colour} object is a {kind}." for colour, kind in shown]


def test_of_two_things_each_has_its_own_colour_and_place(ask) -> None:
    pair = (("red", "circle", EDGES["left"]), ("blue", "square", EDGES["right"]))
    asked = {
        "What is in the picture?": "The picture shows one red circle and one blue square.",
        "What colour is the square?": "The square is blue.",
        "What colour is the circle?": "The circle is red.",
        "What is on the left?": "There is one red circle at the left.",
        "What is on the right?": "There is one blue square at the right.",
        "How many objects are there?": "The number of objects is two.",
        "Is there a star?": "No.",
    }
    answers = ask(*[[("user", [shapes(*pair), question])] for question in asked])
    assert dict(zip(asked, answers, strict=True)) == asked


RELATIONS = [("left", "right", "to the left of", "to the right of"), ("top", "bottom", "above", "below")]


@pytest.mark.parametrize(("here", "there", "before", "behind"), RELATIONS, ids=["sideways", "upright"])
@pytest.mark.parametrize("swapped", [False, True])
def test_what_lies_where_to_what(ask, here: str, there: str, before: str, behind: str, swapped: bool) -> None:
    """Whichever way it is asked, the answer says what holds."""
    first, second = (there, here) if swapped else (here, there)
    picture = shapes(("red", "circle", EDGES[first]), ("blue", "square", EDGES[second]))
    of_circle, of_square = (behind, before) if swapped else (before, behind)
    asked = {
        f"Is the {one} {side} the {other}?": f"The {one} is {holds} the {other}."
        for side in (before, behind)
        for one, other, holds in (("circle", "square", of_circle), ("square", "circle", of_square))
    }
    answers = ask(*[[("user", [picture, question])] for question in asked])
    assert dict(zip(asked, answers, strict=True)) == asked


@pytest.mark.parametrize("ordinal", ["first", "second"])
def test_two_pictures_are_told_apart_in_either_order(ask, ordinal: str) -> None:
    pair = [shape("red", "circle"), shape("blue", "square")]
    shown = [pair, pair[::-1], pair, pair[::-1]]
    answers = ask(*[[("user", [*pictures, f"What is in the {ordinal} picture?"])] for pictures in shown])
    names = [shows("red circle"), shows("blue square")]
    assert answers == (names if ordinal == "first" else names[::-1]) * 2


def test_which_of_two_pictures_shows_something(ask) -> None:
    pair = [shape("red", "circle"), shape("blue", "square")]
    asked = [(p, f"Which picture shows a {k}?") for p in (pair, pair[::-1]) for k in ("circle", "square")]
    answers = ask(*[[("user", [*pictures, question])] for pictures, question in asked])
    assert answers == [f"The {ordinal} picture." for ordinal in ("first", "second", "second", "first")]
    differ = ask(*[[("user", [*p, "How do the pictures differ?"])] for p in (pair, pair[::-1])])
    assert differ == [
        "The first shows one red circle. The second shows one blue square.",
        "The first shows one blue square. The second shows one red circle.",
    ]


def test_what_is_asked_about_one_of_two_pictures_is_not_answered_from_the_other(ask) -> None:
    pair = [shape("red", "circle"), shape("blue", "square")]
    asked = {
        "What colour is the circle in the first picture?": ["The circle is red.", None],
        "What colour is the square in the second picture?": ["The square is blue.", None],
        "What colour is the circle in the second picture?": [None, "The circle is red."],
        "What colour is the square in the first picture?": [None, "The square is blue."],
    }
    for pictures, which in ((pair, 0), (pair[::-1], 1)):
        answers = ask(*[[("user", [*pictures, question])] for question in asked])
        for (question, answer), found in zip(asked.items(), answers, strict=True):
            kind = "circle" if "circle" in question else "square"
            assert found == (answer[which] or f"I do not know. There is no {kind}."), question


def test_a_later_picture_is_the_one_that_is_asked_about(ask) -> None:
    asked = "What is in the picture?"
    before = [("user", [shape("red", "circle"), asked]), ("assistant", [shows("red circle")])]
    (answer,) = ask([*before, ("user", [shape("blue", "square"), asked])])
    assert answer == shows("blue square")


def test_things_are_counted(ask) -> None:
    boxes = list(CORNERS.values())
    pictures = {
        kind: [shapes(*[("blue", kind, box) for box in boxes[:count]]) for count in range(1, 6)]
        for kind in ("circle", "square")
    }
    questions = [
        [("user", [picture, f"How many {kind}s are there?"])]
        for kind, drawn in pictures.items()
        for picture in drawn
    ]
    assert ask(*questions) == [
        f"The number of {kind}s is {number}." for kind in pictures for number in NUMBERS
    ]


def test_things_are_where_they_are_said_to_be(ask) -> None:
    places = CORNERS | EDGES
    pictures = [shapes(("red", "circle", box)) for box in places.values()]
    answers = ask(*[[("user", [picture, "Where is the circle?"])] for picture in pictures])
    assert answers == [f"The circle is at the {place}." for place in places]


def test_a_follow_up_is_about_the_same_picture(ask) -> None:
    picture = shape("yellow", "circle", "navy")
    first = [("user", [picture, "What shape is this?"])]
    (answer,) = ask(first)
    assert answer == "The yellow object is a circle."
    (colour,) = ask([*first, ("assistant", [answer]), ("user", ["What colour is the background?"])])
    assert colour == "The background is blue."


def test_numbers_are_read(ask) -> None:
    numbers = ("7", "42", "385")
    answers = ask(*[[("user", [printed(number), "What number is this?"])] for number in numbers])
    assert answers == [f"The number is {number}." for number in numbers]


def test_what_is_not_there_is_not_made_up(ask) -> None:
    (answer,) = ask([("user", [shape("red", "circle"), "What colour is the star?"])])
    assert answer == "I do not know. There is no star."


def test_words_are_read_letter_by_letter(ask) -> None:
    words = ("house", "Stop", "KILN")
    answers = ask(*[[("user", [printed(word), "What word is written here?"])] for word in words])
    assert answers == [f'The word is "{word}".' for word in words]


def test_a_picture_does_not_stay_in_the_way_of_other_words(ask) -> None:
    about = [("user", [shape("red", "circle"), "What is in the picture?"])]
    said = [*about, ("assistant", [shows("red circle")])]
    (answer,) = ask([*said, ("user", ["What is the capital of France?"])])
    assert answer == "The capital of France is Paris."
