"""A spoken answer through real shells, edges and coordinator, with a thinker and a talker that can be
foretold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from contracts.errors import EngineError
from contracts.messages import Abort, Audio, Generate, Grant, Speak, Vocode
from tests.stages.speech_fakes import (
    END,
    FRAMES_PER_TOKEN,
    Spoken,
    frames_of,
    order,
    pcm_of,
    question,
    speech_graph,
    text_of,
)
from tests.vocoder.fakes import SAMPLES_PER_FRAME


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 240))


def expect(spoken: Spoken, *prompt: int, voice: str = "ada") -> None:
    text = text_of(prompt, len(prompt))
    assert spoken.tokens == text
    assert (spoken.text_finish, spoken.audio_finish) == ("stop", "stop")
    assert torch.equal(spoken.samples, pcm_of(frames_of(voice, text[:-1])))


@pytest.mark.parametrize("edges", ["inproc", "shm"])
def test_eight_at_once_say_what_each_says_alone(edges: str) -> None:
    async def main() -> None:
        async with speech_graph(edges) as graph:
            prompts = [tuple(range(i, 2 * i + 2)) for i in range(8)]
            answers = await asyncio.gather(
                *(graph.speak(question(f"r{i}", *p), order(f"v{i}" * (i + 1))) for i, p in enumerate(prompts))
            )
            for i, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
                expect(answer, *prompt, voice=f"v{i}" * (i + 1))
            await graph.assert_clean()

    run(main())


def test_text_alone_costs_no_talker_work() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            answer = await graph.speak(question("r", 1, 2, 3, speech=False), None)
            assert answer.tokens == text_of((1, 2, 3), 3)
            assert [(s, type(m)) for s, m in graph.sent] == [("thinker", Generate)]
            await graph.assert_clean()

    run(main())


def test_text_does_not_wait_for_audio() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            answer = graph.start(question("r", *range(30)), order(window=1))
            spoken = Spoken()
            async with contextlib.aclosing(answer):
                while spoken.text_finish is None:  # audio is taken as it comes, but one frame is all it may
                    part = await anext(answer)
                    if isinstance(part, Audio):
                        spoken.order.append("audio")
                        continue
                    spoken.take(part)
            assert spoken.tokens == text_of(range(30), 30)
            await graph.assert_clean()

    run(main())


def test_a_slow_listener_stops_the_talker_at_its_window() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            answer = graph.start(question("r", *range(20)), order(window=8))
            async with contextlib.aclosing(answer):
                taken = 0
                while taken < 2 * SAMPLES_PER_FRAME:
                    part = await anext(answer)
                    taken += len(part.pcm) // 4 if isinstance(part, Audio) else 0
                graph.talker.out_of_grant.clear()
                await asyncio.to_thread(graph.talker.out_of_grant.wait, 30)
                assert graph.talker.num_frames_total <= 8 + taken // SAMPLES_PER_FRAME
                spoken = Spoken()
                async for part in answer:
                    spoken.take(part)
                assert spoken.audio_finish == "stop"
            assert graph.talker.num_frames_total == len(frames_of("ada", range(20)))
            await graph.assert_clean()

    run(main())


@pytest.mark.parametrize("edges", ["inproc", "shm"])
def test_an_abort_in_the_middle_walks_down_the_edges_and_leaves_nothing(edges: str) -> None:
    async def main() -> None:
        async with speech_graph(edges) as graph:
            survivor = asyncio.create_task(graph.speak(question("s", *range(25)), order()))
            answer = graph.start(question("r", *range(40)), order("endless", bound=10_000))
            while not isinstance(await anext(answer), Audio):
                pass
            await answer.aclose()
            expect(await survivor, *range(25))
            await graph.assert_clean()
            aborts = [s for s, m in graph.sent if isinstance(m, Abort) and m.request_id == "r"]
            assert aborts == ["thinker", "talker", "vocoder"]

    run(main())


def test_a_talker_without_end_is_cut_at_the_bound_of_its_text() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            answer = await graph.speak(question("r", 1, 2, 3), order("endless", window=6, bound=17))
            assert (answer.text_finish, answer.audio_finish) == ("stop", "length")
            assert answer.samples.numel() == (3 * FRAMES_PER_TOKEN + 17) * SAMPLES_PER_FRAME - 1
            grants = [m for _, m in graph.sent if isinstance(m, Grant)]
            assert grants[-1] == Grant("r", 26, final=True, most_frames=26)
            assert [g.final for g in grants].count(True) == 1
            assert {g.most_frames for g in grants} <= {None, 26}
            await graph.assert_clean()

    run(main())


def test_the_last_bound_holds_for_a_text_of_any_length() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            answer = await graph.speak(question("r", *range(20)), order(max_frames=11))
            assert answer.tokens == text_of(range(20), 20)
            assert answer.audio_finish == "length"
            assert answer.samples.numel() == 11 * SAMPLES_PER_FRAME - 1
            await graph.assert_clean()

    run(main())


def test_silence_without_end_is_cut() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            answer = await graph.speak(question("r", 1, 2), order("quiet", bound=5000))
            assert answer.audio_finish == "length"
            assert 8000 <= answer.samples.numel() < 8000 + 16 * SAMPLES_PER_FRAME
            await graph.assert_clean()

    run(main())


def test_an_end_at_the_first_frame_is_an_error() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            with pytest.raises(EngineError, match="no audio") as caught:
                await graph.speak(question("r", 1, 2), order("mute"))
            assert (caught.value.code, caught.value.stage, caught.value.request_id) == (
                "no_speech",
                "talker",
                "r",
            )
            await graph.assert_clean()

    run(main())


def test_a_text_in_which_nothing_can_be_said_may_have_no_sound() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            given: list[list[int]] = []

            def can_be_said(token_ids: Sequence[int]) -> bool:
                given.append(list(token_ids))
                return False

            asked = replace(order("mute"), can_be_said=can_be_said)
            answer = await graph.speak(question("r", 1, 2), asked)
            assert (answer.text_finish, answer.audio_finish) == ("stop", "stop")
            assert answer.tokens == text_of((1, 2), 2)
            assert answer.samples.numel() == 0
            assert given[-1] == answer.tokens[:-1]
            await graph.assert_clean()

    run(main())


@pytest.mark.parametrize(("voice", "match"), [("broken", "the talker broke"), ("refused", "no room")])
def test_a_failure_of_the_talker_is_the_requests_own(voice: str, match: str) -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            good = asyncio.create_task(graph.speak(question("good", *range(9)), order()))
            with pytest.raises(EngineError, match=match):
                await graph.speak(question("bad", *range(9)), order(voice))
            expect(await good, *range(9))
            await graph.assert_clean()

    run(main())


def test_a_given_text_is_spoken_word_for_word() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            answer = await graph.speak(question("r", 1, 2, 3, forced=(9, 8, 7, 6)), order())
            assert (answer.tokens, answer.text_finish) == ([], "stop")
            assert torch.equal(answer.samples, pcm_of(frames_of("ada", [9, 8, 7, 6])))
            await graph.assert_clean()

    run(main())


def test_a_stop_string_ends_the_text_and_what_was_said_is_spoken() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            graph.thinker.most_unstopped = 20  # ahead of the client, but not at its end before the stop
            spoken, stopped = Spoken(), False
            async for part in graph.start(question("r", *range(300)), order()):
                spoken.take(part)
                if len(spoken.tokens) >= 5 and not stopped:  # several may come at once
                    graph.coordinator.stop_sample("r", 0)
                    stopped = True
            assert 5 <= len(spoken.tokens) <= 20
            assert spoken.tokens == text_of(range(300), 300)[: len(spoken.tokens)]
            assert spoken.audio_finish == "stop"
            assert END not in spoken.tokens
            # The thinker was ahead of the stop, so more may be spoken than was written; never less.
            all_codes = frames_of("ada", text_of(range(300), 300)[:-1])
            said = spoken.samples.numel() // SAMPLES_PER_FRAME
            assert 5 * FRAMES_PER_TOKEN <= said < len(all_codes)
            first = 5 * FRAMES_PER_TOKEN * SAMPLES_PER_FRAME
            assert torch.equal(spoken.samples[:first], pcm_of(all_codes)[:first])
            await graph.assert_clean()

    run(main())


def test_downstream_stages_are_opened_before_the_thinker_starts() -> None:
    async def main() -> None:
        async with speech_graph() as graph:
            await graph.speak(question("r", 1), order())
            opening = [type(m) for _, m in graph.sent][:3]
            assert opening == [Vocode, Speak, Generate]

    run(main())
