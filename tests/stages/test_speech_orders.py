"""What a client asks to be spoken: refusals that say what there is, and the bounds of an order."""

from __future__ import annotations

import pytest
import torch

from contracts.chunks import Chunk
from contracts.errors import BadRequest, TooManyRequests
from contracts.media import Prompt
from contracts.messages import Audio, Speak
from contracts.params import SamplingParams
from contracts.specs import SpeechSpec
from stages.deployment import Deployment, ServerConfig, VocoderConfig
from stages.early_chunks import EarlyChunks
from stages.service import SpeechOptions
from stages.silence import LONGEST_PAUSE_S, SilenceGuard
from stages.speech_orders import SpeechDesk, check_speech, speech_order
from stages.talker_stage import TalkerStage
from tests.stages.speech_fakes import FakeTalker

SPEC = SpeechSpec(
    sample_rate=24_000,
    samples_per_frame=1920,
    num_code_groups=4,
    voices=("Ada", "Bob"),
    sampling=SamplingParams(temperature=0.9, top_k=50),
)


@pytest.mark.parametrize(
    ("spec", "options", "n", "match"),
    [
        (None, SpeechOptions(), 1, "no voice"),
        (SPEC, SpeechOptions(), 2, "n must be 1"),
        (SPEC, SpeechOptions(voice="alloy"), 1, "there are Ada, Bob"),
        (SPEC, SpeechOptions(voice=""), 1, "there are Ada, Bob"),
        (SPEC, SpeechOptions(voice="x" * 10_000), 1, "there are Ada, Bob"),
        (SPEC, SpeechOptions(verbatim=" \n"), 1, "no text"),
    ],
)
def test_refusals_say_what_there_is(spec, options, n: int, match: str) -> None:
    with pytest.raises(BadRequest, match=match) as caught:
        check_speech(spec, options, SamplingParams(n=n), "model")
    assert len(caught.value.message) < 200


def test_an_order_is_bounded_and_repeatable() -> None:
    server = ServerConfig(audio_window_s=2.0, max_speech_s=60.0)
    sampling = SamplingParams(max_tokens=10, seed=1)
    order = speech_order(SPEC, server, SpeechOptions(voice="bOB"), sampling)
    assert (order.voice, order.window_frames, order.max_frames) == ("Bob", 25, 188)
    assert order.sampling.temperature == 0.9
    assert order.sampling.top_k == 50
    again = speech_order(SPEC, server, SpeechOptions(voice="Bob"), sampling)
    assert again.sampling == order.sampling
    long = speech_order(SPEC, server, SpeechOptions(), SamplingParams(max_tokens=1000, seed=1))
    assert (long.voice, long.max_frames) == ("Ada", 750)
    own = SpeechOptions(sampling=SamplingParams(temperature=0.0, seed=7))
    assert speech_order(SPEC, server, own, sampling).sampling.seed == 7


def test_no_more_is_spoken_at_once_than_the_vocoder_takes() -> None:
    deployment = Deployment(vocoders={"vocoder": VocoderConfig(max_streams=1)})
    desk = SpeechDesk(SPEC, deployment, "model")
    with desk.admitted(SpeechOptions(), SamplingParams()):
        with pytest.raises(TooManyRequests), desk.admitted(SpeechOptions(), SamplingParams()):
            pass
        with desk.admitted(None, SamplingParams(n=3)):
            assert desk.stats()["num_speaking"] == 1
    desk.count(Audio(request_id="r", pcm=b""))
    desk.count(Audio(request_id="r", pcm=b"", finish_reason="length"))
    assert desk.stats() == {"num_speaking": 0, "speeches_total": 1, "speeches_cut_total": 1}


def test_silence_is_counted_over_chunks_from_the_last_sound() -> None:
    guard = SilenceGuard(100)
    limit = int(LONGEST_PAUSE_S * 100)
    assert not guard.hears_no_end(torch.zeros(limit - 1))
    assert not guard.hears_no_end(torch.tensor([0.5, 0.0]))
    assert not guard.hears_no_end(torch.zeros(limit - 2))
    assert guard.hears_no_end(torch.zeros(1))


def test_what_comes_before_its_opening_waits_for_it_in_order() -> None:
    early = EarlyChunks()
    chunks = [Chunk("r", "text", seq, False) for seq in range(3)]
    assert early.accept(chunks[0]) == []
    assert early.accept(chunks[1]) == []
    assert early.num_held == 2
    assert early.open("r") == chunks[:2]
    assert early.accept(chunks[2]) == [chunks[2]]
    early.forget("r")
    assert early.is_empty
    early.accept(Chunk("never opened", "text", 0, False))
    assert not early.is_empty
    early.forget("never opened")
    assert early.is_empty


def test_the_talker_stage_gives_early_chunks_to_its_engine() -> None:
    engine = FakeTalker()
    stage = TalkerStage("talker", "vocoder", lambda: (engine, ""))
    stage.start()
    stage.accept(Chunk("r", "prompt", 0, True, {"hidden": torch.ones(2)}))
    stage.accept(Chunk("r", "text", 0, True, {"token_ids": torch.tensor([3, 4])}))
    speak = Speak(
        request_id="r",
        prompt=Prompt([1]),
        voice="ada",
        sampling=SamplingParams(seed=0),
        max_frames=9,
        granted_frames=9,
    )
    assert stage.handle(speak) == []
    assert engine.utterances["r"].text == [3, 4]
    assert engine.utterances["r"].text_ended
    stage.abort("r")
    assert stage.is_idle()
