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
NUMBERS = ("one", "two", "three", "four", "five")


def shapes(*things: tuple[str, str, Box], background: str = "white") -> Image.Image:
    image = Image.new("RGB", (320, 240), background)
    draw = ImageDraw.Draw(image)
    for colour, kind, box in things:
        (draw.ellipse if kind == "circle" else draw.rectangle)(box, fill=colour)
    return image


def shape(colour: str, kind: str, background: str = "white") -> Image.Image:
    return shapes((colour, kind, MIDDLE), background=background)


def shown_by(answer: str) -> str:
    """Of one thing."""
    return answer.rpartition(" one ")[2].removesuffix(".")


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
    assert [shown_by(answer) for answer in ask(*questions)] == [
        f"{colour} {kind}" for colour, kind in shown * 2
    ]


@pytest.mark.parametrize("ordinal", ["first", "second"])
def test_two_pictures_are_told_apart_in_either_order(ask, ordinal: str) -> None:
    pair = [shape("red", "circle"), shape("blue", "square")]
    shown = [pair, pair[::-1], pair, pair[::-1]]
    answers = ask(*[[("user", [*pictures, f"What is in the {ordinal} picture?"])] for pictures in shown])
    names = ["red circle", "blue square"]
    assert [shown_by(answer) for answer in answers] == (names if ordinal == "first" else names[::-1]) * 2


def test_a_later_picture_is_the_one_that_is_asked_about(ask) -> None:
    asked = "What is in the picture?"
    before = [("user", [shape("red", "circle"), asked]), ("assistant", ["The picture shows one red circle."])]
    (answer,) = ask([*before, ("user", [shape("blue", "square"), asked])])
    assert shown_by(answer) == "blue square"


def test_things_are_counted(ask) -> None:
    boxes = list(CORNERS.values())
    pictures = [shapes(*[("blue", "circle", box) for box in boxes[:count]]) for count in range(1, 6)]
    answers = ask(*[[("user", [picture, "How many circles are there?"])] for picture in pictures])
    assert answers == [f"The number of circles is {number}." for number in NUMBERS]


def test_things_are_where_they_are_said_to_be(ask) -> None:
    pictures = [shapes(("red", "circle", box)) for box in CORNERS.values()]
    answers = ask(*[[("user", [picture, "Where is the circle?"])] for picture in pictures])
    assert answers == [f"The circle is at the {place}." for place in CORNERS]


def test_a_follow_up_is_about_the_same_picture(ask) -> None:
    picture = shape("yellow", "circle", "navy")
    first = [("user", [picture, "What shape is this?"])]
    (answer,) = ask(first)
    assert "circle" in answer
    (colour,) = ask([*first, ("assistant", [answer]), ("user", ["What colour is the background?"])])
    assert colour == "The background is blue."


def test_numbers_are_read(ask) -> None:
    numbers = ("7", "42", "385")
    answers = ask(*[[("user", [printed(number), "What number is this?"])] for number in numbers])
    assert answers == [f"The number is {number}." for number in numbers]


def test_what_is_not_there_is_not_made_up(ask) -> None:
    (answer,) = ask([("user", [shape("red", "circle"), "What colour is the star?"])])
    assert answer.startswith("I do not know")


def test_words_are_read_letter_by_letter(ask) -> None:
    words = ("house", "Stop", "KILN")
    answers = ask(*[[("user", [printed(word), "What word is written here?"])] for word in words])
    assert answers == [f'The word is "{word}".' for word in words]


def test_a_picture_does_not_stay_in_the_way_of_other_words(ask) -> None:
    about = [("user", [shape("red", "circle"), "What is in the picture?"])]
    said = [*about, ("assistant", ["The picture shows one red circle."])]
    (answer,) = ask([*said, ("user", ["What is the capital of France?"])])
    assert answer == "The capital of France is Paris."
