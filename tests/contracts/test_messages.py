"""Control-plane messages keep their type and content over the wire; media types keep their invariants."""

from __future__ import annotations

import msgspec
import pytest

from contracts import messages
from contracts.chunks import ChunkHeader, TensorHeader, TensorHeaders
from contracts.conversation import Conversation, MediaPart, Message, TextPart
from contracts.digests import ContentDigest
from contracts.errors import BadRequest
from contracts.media import FeatureRef, MediaItem, MediaOptions, MediaSource, MediaSpan, Prompt
from contracts.messages import FromStage, SampleDelta, TokenLogprobs, ToStage
from contracts.params import SamplingParams
from contracts.specs import ImageSpec, SpeechSpec

ITEM = MediaItem(
    modality="image",
    bytes_digest=ContentDigest(bytes(range(16))),
    pixel_digest=ContentDigest(bytes(16)),
    num_tokens=4,
    grid_thw=(1, 4, 4),
    source_size=(60, 50),
    features=FeatureRef("arena", 64, 9408, "uint8", (56, 56, 3)),
)
PROMPT = Prompt([1, 2, 2, 2, 2, 3], (ITEM,), (MediaSpan(1, 4, 0, ITEM.pixel_digest, (True,) * 4),))
SAMPLING = SamplingParams(n=2, seed=7, logit_bias=((3, -1.5),), stop_token_ids=(9,), logprobs=0)

TO_STAGE = [
    messages.Generate(
        request_id="r", prompt=PROMPT, sampling=SAMPLING, priority=-1, cache_salt="s", resume=((5, 6), ())
    ),
    messages.Generate(request_id="r", prompt=PROMPT, sampling=SAMPLING, speech=True, forced=(5, 6)),
    messages.Speak(
        request_id="r", prompt=PROMPT, voice="ada", sampling=SAMPLING, max_frames=99, granted_frames=20
    ),
    messages.Grant("r", 40, final=True),
    messages.Vocode(request_id="r", voice="ada", seed=3, skip_samples=480),
    messages.Encode(request_id="r", item_index=0, item=ITEM, target="thinker"),
    messages.Listen(4, ITEM),
    messages.Abort("r"),
    messages.StopSample("r", 1),
    messages.ResetCache(3),
    messages.CheckIntegrity(4),
    messages.Shutdown(),
]
FROM_STAGE = [
    messages.EmbeddingsNeeded("r", (0, 2)),
    messages.FeaturesNeeded("r", 0),
    messages.FeaturesConsumed("r", 0),
    messages.Heard(4, "audio", "good morning"),
    messages.Heard(5, "audio", error=BadRequest("no").info()),
    messages.Generated(
        request_id="r",
        deltas=(
            SampleDelta(sample=0, token_ids=(5,), logprobs=(TokenLogprobs(-0.5, 1, ((5, -0.5),)),)),
            SampleDelta(sample=1, token_ids=(2,), finish_reason="stop", stop_token_id=2),
        ),
        num_cached_tokens=16,
    ),
    messages.Audio(request_id="r", pcm=bytes(8), finish_reason="stop"),
    messages.Failed("r", BadRequest("no", param="x").info()),
    messages.Aborted("r", "thinker"),
    messages.CacheWasReset(3, "thinker"),
    messages.IntegrityReport(4, "thinker", None, False),
    messages.StageStep("thinker", "loading weights (257 MiB)"),
    messages.StageReady("thinker", "4096 tokens"),
    messages.StageStats("thinker", {"steps_total": 3.0}),
    messages.StageFailed("thinker", BadRequest("no").info()),
]


def over_the_wire(value, type_):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type_)


@pytest.mark.parametrize(("samples", "union"), [(TO_STAGE, ToStage), (FROM_STAGE, FromStage)])
def test_messages_cross_the_wire(samples, union):
    for sample in samples:
        received = over_the_wire(sample, union)
        assert type(received) is type(sample)
        assert received == sample


@pytest.mark.parametrize(("samples", "union"), [(TO_STAGE, ToStage), (FROM_STAGE, FromStage)])
def test_every_member_of_the_union_is_sampled(samples, union):
    assert {type(sample) for sample in samples} == set(union.__args__)


def test_conversations_and_headers_cross_the_wire():
    source = MediaSource("image", "data:,x", MediaOptions("low", 1, 2), "messages[0].content[1]")
    conversation = Conversation(messages=(Message(role="user", parts=(TextPart("a"), MediaPart(source))),))
    assert over_the_wire(conversation, Conversation) == conversation
    assert conversation.media() == [source]
    tensors = TensorHeaders(here=(TensorHeader("x", "bfloat16", (2, 3)),))
    header = ChunkHeader(
        request_id="r",
        stream="0",
        seq=1,
        last=True,
        tensors=msgspec.Raw(msgspec.msgpack.encode(tensors)),
        meta={"a": 1, "b": 0.5, "c": "d"},
    )
    came = over_the_wire(header, ChunkHeader)
    assert came == header
    assert over_the_wire(came.tensors, TensorHeaders) == tensors


def test_a_prompt_counts_its_media_tokens():
    assert PROMPT.num_media_tokens == 4
    assert PROMPT.spans[0].end == 5


def test_greedy_and_penalties():
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.01).greedy
    assert not SamplingParams().has_penalties
    for changed in ({"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}):
        assert SamplingParams(**changed).has_penalties


def test_speech_is_bounded_by_its_text():
    spec = SpeechSpec(sample_rate=24_000, samples_per_frame=1920, num_code_groups=4, voices=("ada",))
    assert spec.frames_per_s == 12.5
    assert spec.max_frames_of(0) == 63
    assert spec.max_frames_of(10) == 188


def test_keys_hold_every_option():
    spec = ImageSpec(patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=1, max_pixels=2)
    changed = [msgspec.structs.replace(spec, **{name: value}) for name, value in SPEC_CHANGES.items()]
    assert set(SPEC_CHANGES) == set(ImageSpec.__struct_fields__)
    assert len({spec.key(), *(other.key() for other in changed)}) == len(changed) + 1
    assert spec.factor == 28
    options = [MediaOptions(), MediaOptions("low"), MediaOptions(min_pixels=1), MediaOptions(max_pixels=1)]
    assert len({option.key() for option in options}) == len(options)


SPEC_CHANGES = {
    "patch_size": 16,
    "merge_size": 1,
    "temporal_patch_size": 1,
    "min_pixels": 3,
    "max_pixels": 4,
    "max_aspect_ratio": 9.0,
    "resample": "lanczos",
    "alpha": "drop",
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
