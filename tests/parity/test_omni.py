"""The omni families' thinkers against `transformers` generate: the same tokens and log-probabilities of text,
pictures, sound and video, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.errors import BadRequest
from model_families.registry import open_family
from tests.omni_oracle import Heard, OmniTurn, Oracle, Seen, served_turns, sound
from tests.parity.preempting import Tight
from tests.parity.test_matrix import assert_same
from tests.preprocess.films import film
from tests.served import Served, meeting, picture
from tests.spoken import speak
from tests.tiny_omni import OMNI_FAMILIES

torch.set_num_threads(1)
NEW_TOKENS = 10
WIDE = ("thinker.kv_memory=16MiB", "thinker.long_prefill_cap=2048")
CUT = ("thinker.kv_memory=16MiB", "thinker.long_prefill_cap=29", "thinker.max_step_visual_tokens=17")

A, B = picture(1), picture(2, 112, 60)
LONG, SHORT = Heard(sound(1, 2.3)), Heard(sound(2, 1.1))


def clip(seed: int, num_frames: int, sampled: float | None = None, *, with_sound: bool = False) -> Seen:
    """Four frames a second, `sampled` of them (None: as the family does)."""
    frames = [np.asarray(picture(seed + i, 96, 80)) for i in range(num_frames)]
    heard = sound(seed, num_frames / 4)[None]
    return Seen(film(frames, fps=4, codec="mpeg4", sound=heard), with_sound, sampled)


SILENT = clip(10, 12)
TALKIE, SLOW_TALKIE = clip(30, 14, with_sound=True), clip(50, 16, 1.5, with_sound=True)

TURNS: dict[str, Sequence[OmniTurn]] = {
    "text": [("user", ["hello there, the answer is"])],
    "image": [("user", [A, "what is it?"])],
    "sound": [("user", ["listen: ", LONG, "what is it?"])],
    "mixed": [("user", [LONG, "then", B, "and", SHORT, A, "compare them"])],
    "video": [("user", [SILENT, "what happens?"])],
    "video with sound": [("user", ["see: ", TALKIE, "what is said?"])],
    "videos with sound, mixed": [
        ("user", [A, SLOW_TALKIE, "and", SHORT, "then", TALKIE, "well?"]),
        ("assistant", ["so"]),
        ("user", ["and now?"]),
    ],
    "3 turns": [
        ("system", ["be brief"]),
        ("user", [A, "one"]),
        ("assistant", ["1"]),
        ("user", ["two", LONG]),
        ("assistant", ["2"]),
        ("user", [SHORT, "three?"]),
    ],
}


@pytest.fixture(params=OMNI_FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracles(tiny_omni: Callable[..., Path]) -> Callable[[str, str], tuple]:
    """`oracles(family, name)`: what the reference answers, computed once."""
    known: dict[tuple[str, str], tuple[list[int], torch.Tensor]] = {}

    def answer(family: str, name: str) -> tuple[list[int], torch.Tensor]:
        if (family, name) not in known:
            with Served(tiny_omni(family), *WIDE) as served:
                oracle = Oracle(tiny_omni(family), family, served)
                for each, turns in TURNS.items():
                    known[family, each] = oracle(turns, NEW_TOKENS)
        return known[family, name]

    return answer


@pytest.mark.parametrize("settings", [WIDE, CUT], ids=["one chunk", "cut"])
def test_alone_cold_and_warm(tiny_omni, oracles, family: str, settings: tuple[str, ...]) -> None:
    with Served(tiny_omni(family), *settings) as served:
        for name, turns in TURNS.items():
            served.reset_cache()
            cold = served.ask(served_turns(turns), max_tokens=NEW_TOKENS, logprobs=3)
            assert_same(cold, oracles(family, name))
            assert cold.num_cached_tokens == 0
            warm = served.ask(served_turns(turns), max_tokens=NEW_TOKENS, logprobs=3)
            assert_same(warm, oracles(family, name))
            assert warm.num_cached_tokens >= (len(warm.prompt_token_ids) - 1) // 16 * 16
        served.assert_clean()


@pytest.mark.parametrize("settings", [WIDE, CUT], ids=["one chunk", "cut"])
def test_all_at_once(tiny_omni, oracles, family: str, settings: tuple[str, ...]) -> None:
    names = [*TURNS, "sound", "mixed"]
    with Served(tiny_omni(family), *settings) as served:
        turns = [served_turns(TURNS[name]) for name in names]
        with meeting(len(turns)):
            answers = served.ask_all(turns, max_tokens=NEW_TOKENS, logprobs=3)
        for name, answer in zip(names, answers, strict=True):
            assert_same(answer, oracles(family, name))
        assert served.stats("audio")["encoder_items_total"] == 4  # each sound and sound track once
        served.assert_clean()


def test_a_thinker_that_is_all_of_its_checkpoint(tiny_omni, oracles, family: str) -> None:
    """The same answers, and no voice to ask for."""
    with Served(tiny_omni(family, thinker_only=True), *WIDE) as served:
        assert {health.stage for health in served.service.health()} == {
            *("preprocess", "vision", "audio", "thinker")
        }
        names = list(TURNS)
        with meeting(len(names)):
            answers = served.ask_all(
                [served_turns(TURNS[n]) for n in names], max_tokens=NEW_TOKENS, logprobs=3
            )
        for name, answer in zip(names, answers, strict=True):
            assert_same(answer, oracles(family, name))
        assert served.service.card.output_modalities == ("text",)
        with pytest.raises(BadRequest, match="it has no voice"):
            served.run(speak(served, list(TURNS["text"])))
        served.assert_clean()


def test_preempted_midway(tiny_omni, family: str) -> None:
    """Each conversation in turn."""
    folder, new_tokens = tiny_omni(family), 16
    with Served(folder, *WIDE) as served:
        oracle = Oracle(folder, family, served)
        expected = {name: oracle(turns, new_tokens, ignore_eos=True) for name, turns in TURNS.items()}
        length = {name: oracle.inputs(turns)["input_ids"].shape[1] for name, turns in TURNS.items()}
    tight = Tight(max(length.values()), new_tokens)
    settings = tight.settings(open_family(folder).decoder_config.kv_bytes_per_token(torch.float32))
    with Served(folder, *settings) as served:
        for name, turns in TURNS.items():
            answer = tight.answer(served, served_turns(turns), length[name], logprobs=3)
            assert_same(answer, expected[name])
        served.assert_clean()
