"""Workloads: one seed, the same bytes; each reuse pattern, the shares it promises."""

from __future__ import annotations

import base64
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.chat.conversations import BadConversation, load_conversations
from benchmarks.chat.distribution import Numbers, Size, Sizes
from benchmarks.chat.images import EncodedImage, synthesize
from benchmarks.chat.load import poisson_arrivals
from benchmarks.chat.prefixes import Expectation, SentPrefixes
from benchmarks.chat.workload import Message, Session, Turn, Workload, WorkloadConfig, build_workload

CONFIG = WorkloadConfig(
    num_sessions=3,
    num_warmup=1,
    turns=Numbers.parse("3"),
    images=Numbers.parse("1"),
    image_size=Sizes.parse("32x24"),
    image_format="jpeg",
    reuse="new",
    pool_size=2,
    window=2,
    prompt_words=Numbers.parse("4-9"),
    output_tokens=8,
    seed=5,
)


def decoded(image: EncodedImage) -> Image.Image:
    _, _, data = image.data_url.partition(b",")
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))


@pytest.mark.parametrize("text", ["5", "3-6", "3,9,4"])
def test_numbers_stay_in_what_was_written_and_reach_its_ends(text: str) -> None:
    numbers = Numbers.parse(text)
    drawn = {numbers.draw(random.Random(seed)) for seed in range(100)}
    assert drawn == {"5": {5}, "3-6": {3, 4, 5, 6}, "3,9,4": {3, 4, 9}}[text]


def test_sizes_draw_each_side_or_one_of_the_choices() -> None:
    uniform, choice = Sizes.parse("10x20-12x22"), Sizes.parse("8x9,7x6")
    drawn = [uniform.draw(random.Random(seed)) for seed in range(200)]
    assert {size.width for size in drawn} == {10, 11, 12}
    assert {size.height for size in drawn} == {20, 21, 22}
    assert {choice.draw(random.Random(seed)) for seed in range(50)} == {Size(8, 9), Size(7, 6)}
    assert Sizes.parse("64").draw(random.Random(0)) == Size(64, 64)


@pytest.mark.parametrize("text", ["", "x", "6-3", "1,b"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Numbers.parse(text)


@pytest.mark.parametrize("image_format", ["jpeg", "png"])
def test_images_have_their_size_and_detail_at_every_scale(image_format: str) -> None:
    image = synthesize(1, Size(96, 64), image_format)
    picture = decoded(image)
    assert (picture.size, picture.format, picture.mode) == ((96, 64), image_format.upper(), "RGB")
    assert image.data_url.startswith(f"data:image/{image_format};base64,".encode())
    for factor in (1, 4, 16):  # the spread of the values survives averaging
        low, high = (
            picture.convert("L").resize((96 // factor, 64 // factor), Image.Resampling.BOX).getextrema()
        )
        assert high - low > 40
    assert len(picture.getcolors(96 * 64)) > 500


def test_one_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    def sent(config: WorkloadConfig) -> list[bytes]:
        workload = build_workload(config)
        return [
            message.encode()
            for session in (*workload.warmup, *workload.sessions)
            for message in workload.request(session, 2, [turn.answer for turn in session.turns])
        ]

    assert sent(CONFIG) == sent(CONFIG)
    assert sent(CONFIG) != sent(replace(CONFIG, seed=6))
    one, other = build_workload(CONFIG), build_workload(replace(CONFIG, seed=6))
    assert not set(one.sessions[0].turns) & set(other.sessions[0].turns)
    assert build_workload(CONFIG).sha256 == build_workload(CONFIG).sha256
    hashes = [
        build_workload(replace(CONFIG, **change)).sha256
        for change in ({}, {"seed": 6}, {"reuse": "one"}, {"output_tokens": 9}, {"image_format": "png"})
    ]
    assert len(set(hashes)) == len(hashes)


def test_more_sessions_leave_the_first_ones_as_they_were() -> None:
    few, many = build_workload(CONFIG), build_workload(replace(CONFIG, num_sessions=5))
    assert few.sessions == many.sessions[:3]


def test_messages_are_the_json_of_the_chat_api() -> None:
    image = EncodedImage.of(b"abc", "image/png", Size(1, 1))
    assert json.loads(Message("user", 'say "é"\n', (image,)).encode()) == {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}},
            {"type": "text", "text": 'say "é"\n'},
        ],
    }
    assert json.loads(Message("assistant", "a").encode()) == {"role": "assistant", "content": "a"}


SPREADS = [(0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (5, [2, 2, 1])]


@pytest.mark.parametrize(("num_images", "per_turn"), SPREADS)
def test_images_are_spread_over_the_turns(num_images: int, per_turn: list[int]) -> None:
    workload = build_workload(replace(CONFIG, images=Numbers.parse(str(num_images))))
    for session in workload.sessions:
        assert [len(turn.images) for turn in session.turns] == per_turn


def test_warm_up_shares_no_image_with_what_is_measured() -> None:
    for reuse in ("new", "pool", "window", "one"):
        workload = build_workload(replace(CONFIG, reuse=reuse))
        images = [
            {image.digest for session in group for turn in session.turns for image in turn.images}
            for group in (workload.warmup, workload.sessions)
        ]
        assert images[0]
        assert not images[0] & images[1]


# Expected shares: a text of 4 characters is 1 token, an image of 28x28 pixels 1 token at 784 pixels a token,
# a message 4 tokens. So a user turn with an image is 4 + 1 + 1 = 6, without one 5, an assistant turn 5.


def picture(name: str) -> EncodedImage:
    return EncodedImage.of(name.encode(), "image/png", Size(28, 28))


def observed(workload: Workload) -> list[tuple[float, float, int, int]]:
    sent = SentPrefixes(784)
    return [
        (one.known_prefix_tokens, one.prompt_tokens, one.num_known_images, one.num_images)
        for session in workload.sessions
        for turn in range(len(session.turns))
        for one in [sent.observe(workload.request(session, turn, [past.answer for past in session.turns]))]
    ]


def session(*shown: str, name: str = "s") -> Session:
    turns = [
        Turn(f"{name}q{index:02}", (picture(one),) if one else (), f"{name}a{index:02}")
        for index, one in enumerate(shown)
    ]
    return Session("", tuple(turns))


def test_new_images_know_only_their_own_conversation() -> None:
    workload = Workload((session("a", "", name="s"), session("b", "", name="t")), ())
    # turn 1: user 6 | turn 2: user 6 known, assistant 5 (only its role was never sent), user 5
    # The second session shares the first message's role (4 tokens) and nothing behind it.
    assert observed(workload) == [(0, 6, 0, 1), (6, 16, 1, 1), (4, 6, 0, 1), (6, 16, 1, 1)]


def test_one_image_is_known_everywhere_up_to_the_question() -> None:
    workload = Workload((session("a", name="s"), session("a", name="t")), ())
    assert observed(workload) == [(0, 6, 0, 1), (5, 6, 1, 1)]


def test_a_pool_knows_what_any_session_showed() -> None:
    workload = Workload((session("a", name="s"), session("b", name="t"), session("a", name="u")), ())
    assert observed(workload) == [(0, 6, 0, 1), (4, 6, 0, 1), (5, 6, 1, 1)]


def test_a_window_drops_old_images_and_with_them_the_prefix() -> None:
    workload = Workload((session("a", "b", "c"),), (), window=2)
    # Third request: the first image is gone, so only the first message's role (4) is a prefix sent before.
    assert observed(workload) == [(0, 6, 0, 1), (6, 17, 1, 2), (4, 27, 1, 2)]
    shown = [len(message.images) for message in workload.request(workload.sessions[0], 2, ["", ""])]
    assert shown == [0, 0, 1, 0, 1]


def test_a_window_keeps_the_last_images_of_a_message_with_many() -> None:
    shown = tuple(picture(name) for name in "abc")
    many = Session("", (Turn("q", shown, "a"),))
    (message,) = Workload((many,), (), window=2).request(many, 0, [])
    assert message.images == shown[1:]


def test_the_same_request_again_is_known_whole() -> None:
    sent, messages = SentPrefixes(784), [Message("user", "abcd", (picture("a"),))]
    sent.observe(messages)
    assert sent.observe(messages) == Expectation(6, 6, 1, 1)


def test_an_answer_of_the_server_is_known_as_it_was_given() -> None:
    sent, first = SentPrefixes(784), [Message("user", "abcd")]
    sent.observe(first)
    sent.answered(first, "efgh")
    later = [*first, Message("assistant", "efgh"), Message("user", "ijkl")]
    assert sent.observe(later).known_prefix_tokens == 10


def test_image_area_is_weighed() -> None:
    wide = EncodedImage.of(b"w", "image/png", Size(280, 28))
    assert SentPrefixes(784).observe([Message("user", "abcd", (wide,))]).prompt_tokens == 15


def test_arrivals_are_seeded_and_of_their_rate() -> None:
    arrivals = poisson_arrivals(4.0, 4000, seed=1)
    assert arrivals == poisson_arrivals(4.0, 4000, seed=1)
    assert arrivals != poisson_arrivals(4.0, 4000, seed=2)
    assert list(arrivals) == sorted(arrivals)
    gaps = [b - a for a, b in zip((0.0, *arrivals), arrivals, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.06)
    # exponential: the deviation equals the mean
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


def write_lines(path: Path, *conversations: object) -> Path:
    path.write_text("\n".join(json.dumps({"messages": one}) for one in conversations) + "\n\n")
    return path


def test_own_conversations_become_turns_with_their_files(tmp_path: Path) -> None:
    Image.new("RGB", (5, 4)).save(tmp_path / "p.png")
    file = {"type": "image_url", "image_url": {"url": "p.png"}}
    remote = {"type": "image_url", "image_url": {"url": 'http://h/"x".png'}}
    path = write_lines(
        tmp_path / "c.jsonl",
        [{"role": "user", "content": "warm"}],
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [file, {"type": "text", "text": "what"}]},
            {"role": "assistant", "content": "a box"},
            {"role": "user", "content": [remote, {"type": "text", "text": "and this"}]},
        ],
    )
    workload = load_conversations(path, 1)
    assert [turn.question for turn in workload.warmup[0].turns] == ["warm"]
    (only,) = workload.sessions
    assert (only.system, only.turns[0].answer) == ("be brief", "a box")
    assert only.turns[0].images[0].size == Size(5, 4)
    assert (
        base64.b64decode(only.turns[0].images[0].data_url.partition(b",")[2])
        == (tmp_path / "p.png").read_bytes()
    )
    last = json.loads(workload.request(only, 1, ["a box"])[-1].encode())
    assert last["content"][0]["image_url"]["url"] == 'http://h/"x".png'


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "no user message"),
        ([{"role": "assistant", "content": "x"}], "where one of user must come"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "gone.png"}}]}],
            "gone.png",
        ),
        ([{"role": "user", "content": [{"type": "video_url"}]}], "video_url"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,%"}}]}],
            "image data",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, messages: object, why: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", messages)
    with pytest.raises(BadConversation, match=why) as caught:
        load_conversations(path, 0)
    assert "c.jsonl:1" in str(caught.value)


def test_too_few_conversations_for_the_warm_up(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"role": "user", "content": "x"}])
    with pytest.raises(BadConversation, match="1 conversations"):
        load_conversations(path, 1)
