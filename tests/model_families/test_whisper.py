"""Whisper over the paged engine against `transformers`: greedy text, suppression, timestamps, long
recordings."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from contracts.digests import ContentDigest
from contracts.errors import BadRequest
from contracts.media import MediaItem
from contracts.messages import EmbeddingsNeeded, Generate, Generated, SampleDelta, TokenLogprobs
from contracts.specs import MediaSpecs
from contracts.transcription import (
    TranscriptEvent,
    TranscriptionOptions,
    TranscriptLanguage,
    TranscriptSegment,
    TranscriptText,
)
from encoder_pool.graphs import TowerGraphs
from encoder_pool.model import EncoderInput, GraphBounds
from lm_engine.config import EngineConfig
from lm_engine.engine import LMEngine
from lm_engine.memory import allocate_kv
from lm_engine.model import Kernels
from lm_engine.runner import Runner
from model_families.audio.encoder import GRAPHED_FRAMES
from model_families.text import HFChatTokenizer
from model_families.transcription import Ask, Recognition
from model_families.whisper import transcription
from model_families.whisper.config import read_generation, read_whisper_config
from model_families.whisper.encoder import load_encoder
from model_families.whisper.processor import open_processor
from model_families.whisper.rules import WhisperRule
from model_families.whisper.transcription import WhisperTranscriber
from model_families.whisper.weights import load_decoder
from model_families.whisper.words import words_of
from tests.encoder_pool.graph_fakes import Reruns
from tests.tiny_whisper import (
    NUM_MELS,
    WINDOW_FRAMES,
    WINDOW_POSITIONS,
    build_tiny_whisper,
    reference_transcription,
    reference_whisper,
)

CPU = torch.device("cpu")
TRANSCRIBE = {"language": "de", "task": "transcribe"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_tiny_whisper(tmp_path_factory.mktemp("whisper"))


def mel(num_frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(NUM_MELS, num_frames, generator=torch.Generator().manual_seed(seed))


@dataclass
class Heard:
    language: str = ""
    text: str = ""
    segments: list[TranscriptSegment] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of the last window


class Listener:
    """The parts of a Whisper server without the server: encoder, engine and the recognitions they run."""

    def __init__(
        self, folder: Path, *, block_size: int = 16, kernels: Kernels = "reference", **config: int | bool
    ) -> None:
        self.config = read_whisper_config(folder)
        self.processor = open_processor(folder)
        self.encoder = load_encoder(folder, MediaSpecs(), CPU, torch.float32)
        generation = read_generation(folder)
        self.transcriber = WhisperTranscriber(self.config, generation, HFChatTokenizer(folder))
        model = load_decoder(folder, CPU, torch.float32, kernels)
        context = self.config.max_source_positions + self.config.max_target_positions
        num_blocks = int(config.pop("num_blocks", 129))
        settings: dict[str, int | bool] = {"max_step_tokens": 64, "max_sequences": 8, "overlap": True}
        kv = allocate_kv(model.config, num_blocks, block_size, torch.float32, CPU)
        rule = WhisperRule(generation, self.config.vocab_size, CPU)
        self.engine = LMEngine(
            EngineConfig(
                num_blocks=num_blocks,
                context_length=context,
                eos_token_ids=(generation.eos_token_id,),
                block_size=block_size,
                embedding_width=self.config.d_model,
                **(settings | config),  # type: ignore[arg-type]
            ),
            Runner(model, model.attention, kv, max_sequences=8, max_length=context, rule=rule),
            self.processor.positions,
        )

        self.asks: dict[str, Ask] = {}
        self.alignments: dict[str, tuple[int, ...]] = {}

    def assert_clean(self) -> None:
        assert self.engine.check_integrity() is None
        assert self.engine.is_idle()

    def hear(self, *jobs: tuple[torch.Tensor, TranscriptionOptions]) -> list[Heard]:
        """All recordings at the same time."""
        heard = [Heard() for _ in jobs]
        asyncio.run(self._hear(jobs, heard))
        return heard

    async def _hear(
        self, jobs: Sequence[tuple[torch.Tensor, TranscriptionOptions]], heard: list[Heard]
    ) -> None:
        running: dict[str, tuple[int, Recognition, torch.Tensor]] = {}
        for index, (features, options) in enumerate(jobs):
            recognition = self.transcriber.start(options, features.shape[1], features.shape[1] / 100)
            self._go_on(f"{index}.0", index, recognition, features, running)
        while running or not self.engine.is_idle():
            assert self.engine.has_work(), self.engine.stats()
            for message in (await self.engine.step()).messages:
                index, recognition, features = running[message.request_id]
                if isinstance(message, EmbeddingsNeeded):
                    self.engine.embeddings_ready(message.request_id, 0, self._encode(message.request_id))
                    continue
                assert isinstance(message, Generated), message
                (delta,) = message.deltas
                if delta.alignment:
                    self.alignments[message.request_id] = delta.alignment
                heard[index].token_ids += delta.token_ids
                for event in recognition.take(delta):
                    match event:
                        case TranscriptLanguage(language):
                            heard[index].language = language
                        case TranscriptText(text):
                            heard[index].text += text
                        case TranscriptSegment():
                            heard[index].segments.append(event)
                if delta.finish_reason is not None:
                    del running[message.request_id]
                    self._go_on(message.request_id + "+", index, recognition, features, running)
                    if any(i == index for i, *_ in running.values()):
                        heard[index].token_ids = []

    def _go_on(
        self,
        request_id: str,
        index: int,
        recognition: Recognition,
        features: torch.Tensor,
        running: dict[str, tuple[int, Recognition, torch.Tensor]],
    ) -> None:
        ask = recognition.next_ask()
        if ask is None:
            return
        running[request_id] = (index, recognition, features)
        self.windows[request_id] = features[:, ask.start : ask.end]
        item = self._item(ask, features)
        prompt = self.processor.layout(list(ask.token_ids), [item])
        self.asks[request_id] = ask
        message = Generate(request_id=request_id, prompt=prompt, sampling=ask.sampling, align=ask.align)
        self.engine.add(message)

    @property
    def windows(self) -> dict[str, torch.Tensor]:
        return self.__dict__.setdefault("_windows", {})

    def _item(self, ask: Ask, features: torch.Tensor) -> MediaItem:
        content = features[:, ask.start : ask.end].contiguous().numpy().tobytes()
        digest = ContentDigest(hashlib.md5(content).digest())
        return MediaItem(
            modality="audio", bytes_digest=digest, pixel_digest=digest, num_tokens=WINDOW_POSITIONS
        )

    def _encode(self, request_id: str) -> torch.Tensor:
        item = EncoderInput("audio", self.windows[request_id], (0, 0, 0), WINDOW_POSITIONS)
        return self.encoder.encode([item])[0]


Listening = Callable[..., Listener]


@pytest.fixture(autouse=True)
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the oracle is: random weights are never sure of what they say."""
    monkeypatch.setattr(transcription, "TEMPERATURES", (0.0,))


@pytest.fixture
def listening() -> Iterator[Listening]:
    """Makes listeners, and closes them at the end in whatever state they are."""
    made: list[Listener] = []

    def make(*args: Any, **options: Any) -> Listener:
        made.append(Listener(*args, **options))
        return made[-1]

    yield make
    for listener in made:
        listener.engine.close()


def options_of(**changes: object) -> TranscriptionOptions:
    return TranscriptionOptions(**({"language": "de"} | changes))  # type: ignore[arg-type]


def test_the_encoder_equals_the_reference(folder: Path) -> None:
    encoder = load_encoder(folder, MediaSpecs(), CPU, torch.float32)
    windows = [mel(WINDOW_FRAMES, seed=1), mel(37, seed=2)]
    ours = encoder.encode([EncoderInput("audio", w, (0, 0, 0), WINDOW_POSITIONS) for w in windows])
    for window, embeddings in zip(windows, ours, strict=True):
        padded = torch.nn.functional.pad(window, (0, WINDOW_FRAMES - window.shape[1]))
        with torch.no_grad():
            theirs = reference_whisper(folder).model.encoder(padded[None]).last_hidden_state[0]
        torch.testing.assert_close(embeddings, theirs, atol=1e-4, rtol=1e-4)


def test_captured_windows_give_the_same_embeddings(folder: Path) -> None:
    """However long what is in them; the rest of a window is filled up anew."""
    plain, encoder = (load_encoder(folder, MediaSpecs(), CPU, torch.float32) for _ in range(2))
    recorder = Reruns()
    encoder.graphs = TowerGraphs(encoder, 1 << 30, 3, lambda: recorder)
    for turn in range(4):
        for lengths in ((WINDOW_FRAMES,), (37, WINDOW_FRAMES), (WINDOW_FRAMES - turn, 12, 5)):
            mels = [mel(length, seed=turn) for length in lengths]
            items = [EncoderInput("audio", one, (0, 0, 0), WINDOW_POSITIONS) for one in mels]
            for found, expected in zip(encoder.encode(items), plain.encode(items), strict=True):
                assert torch.equal(found, expected)
    assert (recorder.recorded, recorder.runs) == (4, 6)
    bounds = GraphBounds(1, max_tokens=100 * WINDOW_POSITIONS, max_patches=1)
    assert encoder.max_rows(bounds) == min(100, GRAPHED_FRAMES // WINDOW_FRAMES)


@pytest.mark.parametrize(("block_size", "kernels"), [(10, "reference"), (16, "auto")])
def test_text_equals_the_reference(
    folder: Path, block_size: int, kernels: Kernels, listening: Listening
) -> None:
    """With a prefix that ends at a block's end, and inside one. Text is heard with its timestamps, whether
    these
    are wanted or not: so it is the same in every format."""
    listener = listening(folder, block_size=block_size, kernels=kernels)
    recordings = [mel(WINDOW_FRAMES, seed) for seed in range(3)]
    together = listener.hear(*((r, options_of()) for r in recordings))
    for recording, heard in zip(recordings, together, strict=True):
        theirs = reference_transcription(folder, recording, **TRANSCRIBE, return_timestamps=True)
        assert_same_segments(listener, heard, theirs)
        assert heard.text == "".join(s.text for s in heard.segments)
    assert len({heard.text for heard in together}) > 1
    listener.assert_clean()


def reference_text(listener: Listener, token_ids: Sequence[int]) -> str:
    text_ids = [t for t in token_ids if t < listener.transcriber.generation.eos_token_id]
    return listener.transcriber.tokenizer.decode(text_ids)


@pytest.mark.parametrize("num_frames", [WINDOW_FRAMES, 250])
def test_timestamps_and_long_recordings_equal_the_reference(
    folder: Path, num_frames: int, listening: Listening
) -> None:
    listener = listening(folder)
    recording = mel(num_frames, seed=num_frames)
    (heard,) = listener.hear((recording, options_of(timestamps=True)))
    theirs = reference_transcription(folder, recording, **TRANSCRIBE, return_timestamps=True)
    assert_same_segments(listener, heard, theirs, num_frames / 100)
    assert heard.text == "".join(s.text for s in heard.segments)
    listener.assert_clean()


def assert_same_segments(
    listener: Listener, heard: Heard, theirs: list[dict[str, torch.Tensor]], seconds: float = 1.0
) -> None:
    """`seconds`: of the recording, after which nothing of ours ends."""
    times = [(s.start_s, s.end_s) for s in heard.segments]
    clipped = [[min(round(float(s[side]), 2), seconds) for side in ("start", "end")] for s in theirs]
    assert times == [tuple(pair) for pair in clipped]
    texts = [s.text for s in heard.segments]
    assert texts == [reference_text(listener, s["tokens"].tolist()) for s in theirs]
    for ours, their in zip(heard.segments, theirs, strict=True):
        # Of a window's last segment the reference keeps the start of the one it drops.
        assert list(ours.token_ids) == their["tokens"].tolist()[: len(ours.token_ids)]


def test_a_long_recording_needs_no_asking_for_timestamps(folder: Path, listening: Listening) -> None:
    listener = listening(folder)
    recording = mel(250, seed=5)
    plain, timed = listener.hear((recording, options_of()), (recording, options_of(timestamps=True)))
    assert said(plain) == said(timed)
    assert len({s.window_start_s for s in plain.segments}) > 1
    listener.assert_clean()


def test_the_language_is_detected(folder: Path, listening: Listening) -> None:
    listener = listening(folder)
    recordings = [mel(WINDOW_FRAMES, seed) for seed in range(4)]
    heard = listener.hear(*((r, options_of(language=None)) for r in recordings))
    reference = reference_whisper(folder)
    codes = {i: name.strip("<|>") for name, i in reference.generation_config.lang_to_id.items()}
    for recording, ours in zip(recordings, heard, strict=True):
        assert ours.language == codes[int(reference.detect_language(recording[None]))]
        theirs = reference_transcription(
            folder, recording, task="transcribe", language=ours.language, return_timestamps=True
        )
        assert_same_segments(listener, ours, theirs)
    assert len({ours.language for ours in heard}) > 1
    listener.assert_clean()


def test_a_prompt_and_a_task_change_the_answer_as_in_the_reference(
    folder: Path, listening: Listening
) -> None:
    listener = listening(folder)
    recording = mel(130, seed=9)
    start = listener.transcriber.generation.prompt_start
    assert start is not None
    prompt_ids = torch.tensor([start, *listener.transcriber.tokenizer.encode(" hello there")])
    cases = {
        "plain": (options_of(timestamps=True), {}),
        "prompt": (options_of(timestamps=True, prompt=" hello there "), {"prompt_ids": prompt_ids}),
        "translate": (options_of(timestamps=True, task="translate"), {"task": "translate"}),
    }
    heard = listener.hear(*((recording, options) for options, _ in cases.values()))
    for ours, (_, changes) in zip(heard, cases.values(), strict=True):
        theirs = reference_transcription(folder, recording, **(TRANSCRIBE | changes), return_timestamps=True)
        assert_same_segments(listener, ours, theirs, 1.3)
    assert len({ours.text for ours in heard}) == len(cases)
    listener.assert_clean()


def said(heard: Heard) -> tuple[object, ...]:
    """All but the probabilities, whose last bits depend on the batch."""
    return heard.language, heard.text, [(s.start_s, s.end_s, s.token_ids, s.words) for s in heard.segments]


def test_the_schedule_changes_nothing(folder: Path, listening: Listening) -> None:
    """Chunked prefills, batches, preemption in a cache for little more than one, and hits in it."""
    jobs = [
        (mel(130, seed), options_of(words=seed % 2 == 0, language=None if seed == 3 else "fr"))
        for seed in range(4)
    ]
    roomy = listening(folder)
    alone = [said(roomy.hear(job)[0]) for job in jobs]
    assert [said(heard) for heard in roomy.hear(*jobs)] == alone
    roomy.assert_clean()
    for tight in (
        listening(folder, max_step_tokens=13, long_prefill_cap=9, max_step_visual_tokens=9),
        listening(folder, block_size=4, num_blocks=34, prefix_cache=False),
    ):
        assert [said(heard) for heard in tight.hear(*jobs[::-1])] == alone[::-1]
        tight.assert_clean()


def test_an_english_model_says_so(tmp_path: Path, listening: Listening) -> None:
    listener = listening(build_tiny_whisper(tmp_path / "en", seed=3, multilingual=False))
    recording = mel(180, seed=2)
    (heard,) = listener.hear((recording, TranscriptionOptions(timestamps=True)))
    theirs = reference_transcription(tmp_path / "en", recording, return_timestamps=True)
    assert_same_segments(listener, heard, theirs, 1.8)
    assert heard.language == "en"
    for options in (TranscriptionOptions(language="de"), TranscriptionOptions(task="translate")):
        with pytest.raises(BadRequest):
            listener.transcriber.start(options, 100, 1.0)
    listener.assert_clean()


@pytest.mark.parametrize("multilingual", [True, False])
def test_how_likely_silence_is_equals_the_reference(
    tmp_path: Path, multilingual: bool, listening: Listening
) -> None:
    """Of the model's bare distribution where the language would be said, though the rules forbid the
    token."""
    folder = build_tiny_whisper(tmp_path / "silence", seed=4, multilingual=multilingual)
    listener, window = listening(folder), mel(WINDOW_FRAMES, seed=6)
    timed, plain = listener.hear(
        *(
            (window, TranscriptionOptions(language="en", timestamps=timestamps))
            for timestamps in (True, False)
        )
    )
    model = reference_whisper(folder)
    start = torch.tensor([[model.generation_config.decoder_start_token_id]])
    with torch.no_grad():
        logits = model(input_features=window[None], decoder_input_ids=start).logits[0, -1]
    theirs = logits.softmax(-1)[model.generation_config.no_timestamps_token_id - 1].item()
    assert timed.segments
    assert plain.segments
    first = [s for s in timed.segments if s.window_start_s == 0]
    assert [s.no_speech_prob for s in first] == pytest.approx([theirs] * len(first), rel=1e-4)
    assert timed.text == plain.text
    listener.assert_clean()


def test_an_unknown_language_is_refused_by_name(folder: Path, listening: Listening) -> None:
    listener = listening(folder)
    with pytest.raises(BadRequest, match="de, en, fr") as caught:
        listener.transcriber.start(options_of(language="klingon"), 100, 1.0)
    assert caught.value.param == "language"
    listener.assert_clean()


# --- when a window is heard again
# -------------------------------------------------------------------------------
def answer(transcriber: WhisperTranscriber, text: str, logprob: float) -> SampleDelta:
    """Of one segment, all tokens equally likely."""
    generation = transcriber.generation
    times = generation.first_timestamp, generation.first_timestamp + 20
    ids = (times[0], *transcriber.tokenizer.encode(text), times[1], generation.eos_token_id)
    return SampleDelta(
        sample=0,
        token_ids=ids,
        logprobs=tuple(TokenLogprobs(logprob, 1, ()) for _ in ids),
        finish_reason="stop",
        stop_token_id=generation.eos_token_id,
    )


@pytest.fixture
def ladder(folder: Path, monkeypatch: pytest.MonkeyPatch, greedy: None) -> WhisperTranscriber:
    monkeypatch.setattr(transcription, "TEMPERATURES", (0.0, 0.2, 0.4))
    return WhisperTranscriber(read_whisper_config(folder), read_generation(folder), HFChatTokenizer(folder))


def next_window(
    recognition: Recognition, transcriber: WhisperTranscriber, told: list[TranscriptEvent]
) -> Ask | None:
    """The next ask for text; whether anything is said at all is answered: surely."""
    while (ask := recognition.next_ask()) is not None and not ask.is_answer:
        told += recognition.take(answer(transcriber, "", -9.0))
    return ask


def test_a_window_whose_text_is_doubtful_is_heard_again_less_greedily(ladder: WhisperTranscriber) -> None:
    """First too unlikely, then too repetitive, then good; the next window starts at the bottom again."""
    recognition = ladder.start(options_of(), 2 * WINDOW_FRAMES, 2.0)
    asks, told = [], []
    for text, logprob in ((" hm", -1.1), (" na" * 40, -0.1), (" well then", -0.3), (" good bye", -0.4)):
        ask = next_window(recognition, ladder, held := [])
        assert held == []
        assert ask is not None
        asks.append((ask.start, ask.sampling.temperature))
        told.append(recognition.take(answer(ladder, text, logprob)))
    assert recognition.next_ask() is None
    assert asks == [(0, 0.0), (0, 0.2), (0, 0.4), (WINDOW_FRAMES, 0.0)]
    assert told[:2] == [[], []], "nothing is told that may have to be taken back"
    segments = [e for events in told for e in events if isinstance(e, TranscriptSegment)]
    assert [(s.text, s.temperature) for s in segments] == [(" well then", 0.4), (" good bye", 0.0)]


def test_the_last_temperature_is_taken_and_a_given_one_is_the_only_one(ladder: WhisperTranscriber) -> None:
    for options, temperatures in ((options_of(), [0.0, 0.2, 0.4]), (options_of(temperature=0.7), [0.7])):
        recognition = ladder.start(options, WINDOW_FRAMES, 1.0)
        asked: list[float] = []
        events: list[TranscriptEvent] = []
        while (ask := next_window(recognition, ladder, events)) is not None:
            asked.append(ask.sampling.temperature)
            events += recognition.take(answer(ladder, " hm", -3.0))
        assert asked == temperatures
        assert TranscriptText(" hm") in events


def test_the_likelihood_of_a_window_is_the_references(folder: Path, listening: Listening) -> None:
    listener, recording = listening(folder), mel(WINDOW_FRAMES, seed=1)
    recognition = listener.transcriber.start(options_of(), WINDOW_FRAMES, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener.transcriber, "start", lambda *_: recognition)
        listener.hear((recording, options_of()))
    reference = reference_whisper(folder)
    out = reference.generate(
        recording[None],
        **TRANSCRIBE,
        do_sample=False,
        return_timestamps=True,
        output_scores=True,
        return_dict_in_generate=True,
        return_segments=True,
    )
    result = out["segments"][0][0]["result"]
    expected = reference._retrieve_avg_logprobs(list(result["scores"]), result["sequences"], 0.0)
    assert recognition._window.avg_logprob == pytest.approx(float(expected), abs=1e-4)
    listener.assert_clean()


@pytest.mark.parametrize("timestamps", [False, True])
def test_a_window_in_which_nothing_is_said_has_no_text(ladder: WhisperTranscriber, timestamps: bool) -> None:
    """Where the model thinks so and is not sure of its text; it is asked where that matters or is told."""
    cases = (
        *((" you", -0.6, -0.1, ""), (" you", -0.6, -0.7, " you"), (" you", -0.4, -0.1, " you")),
        *((" . . .", -0.3, -0.1, ""), (" . . .", -0.3, -0.7, " . . .")),
    )
    recognition = ladder.start(options_of(timestamps=timestamps), len(cases) * WINDOW_FRAMES, 30.0)
    for index, (text, logprob, silence, told) in enumerate(cases):
        unsure = logprob < transcription.SURE_AVG_LOGPROB or "." in text
        asked = [False, True] if timestamps else [True, False] if unsure else [True]
        events: list[TranscriptEvent] = []
        for is_answer in asked:
            ask = recognition.next_ask()
            assert ask is not None
            assert (ask.start, ask.is_answer) == (index * WINDOW_FRAMES, is_answer)
            events += recognition.take(answer(ladder, *((text, logprob) if is_answer else ("", silence))))
        assert "".join(event.text for event in events if isinstance(event, TranscriptText)) == told
        assert any(isinstance(event, TranscriptLanguage) for event in events) == (index == 0)
    assert recognition.next_ask() is None


@pytest.mark.parametrize("steps", [20, 50])
def test_no_segment_ends_after_its_recording(ladder: WhisperTranscriber, steps: int) -> None:
    """A recording of 0.3 s, filled up to a window: timestamps may lie in the silence behind it."""
    recognition = ladder.start(options_of(timestamps=True), WINDOW_FRAMES, 0.3)
    ask = recognition.next_ask()
    assert ask is not None
    assert not ask.is_answer, "how likely silence is"
    assert recognition.take(answer(ladder, "", -0.1)) == []
    ask = recognition.next_ask()
    assert ask is not None
    assert ask.is_answer
    events = recognition.take(answer(ladder, " hello", -0.1))
    (segment,) = (e for e in events if isinstance(e, TranscriptSegment))
    assert (segment.start_s, segment.end_s) == (0.0, 0.3)
    assert segment.no_speech_prob == pytest.approx(math.exp(-0.1))
    assert recognition.next_ask() is None


# --- when each word is said
# -------------------------------------------------------------------------------------
class _Attended(dict[str, torch.Tensor]):
    """What the reference's function takes: attributes, and `in`."""

    def __init__(self, sequences: torch.Tensor, cross_attentions: Any) -> None:
        self.sequences, self.cross_attentions = sequences, (cross_attentions,)


@pytest.mark.parametrize("multilingual", [True, False])
def test_tokens_are_laid_as_the_reference_lays_them(
    tmp_path: Path, listening: Listening, multilingual: bool
) -> None:
    """Where the checkpoint names the heads, and where all of the upper half are taken."""
    folder = build_tiny_whisper(tmp_path / "w", seed=4, multilingual=multilingual)
    if multilingual:
        named = json.loads((folder / "generation_config.json").read_text())
        named["alignment_heads"] = [[0, 1], [1, 0]]
        (folder / "generation_config.json").write_text(json.dumps(named))
    listener = listening(folder)
    options = options_of(words=True, language="de" if multilingual else None)
    listener.hear(
        *((mel(frames, seed), options) for seed, frames in enumerate((WINDOW_FRAMES, 130, 180, 250)))
    )
    heads = listener.transcriber.generation.heads_of_alignment(listener.config)
    reference = reference_whisper(folder)
    reference.set_attn_implementation("eager")
    # In standard deviations two tokens are always +1 and -1: rounding would choose between paths.
    aligns = {i: a.align for i, a in listener.asks.items() if a.align is not None and a.align.num_tokens > 3}
    assert len(aligns) >= 3
    for request_id, align in aligns.items():
        ask, laid = listener.asks[request_id], listener.alignments[request_id]
        window = torch.nn.functional.pad(
            listener.windows[request_id], (0, WINDOW_FRAMES - (ask.end - ask.start))
        )
        ids = torch.tensor([ask.token_ids])
        with torch.no_grad():
            out = reference(window[None], decoder_input_ids=ids, output_attentions=True)
        num_start = len(ask.token_ids) - align.num_tokens
        times_s = reference._extract_token_timestamps(
            _Attended(ids, out.cross_attentions),
            heads,
            num_frames=2 * align.num_positions,
            num_input_ids=num_start,
        )
        assert [round(0.02 * first, 2) for first in laid] == pytest.approx(
            times_s[0, num_start:-1].tolist(), abs=1e-6
        )
    listener.assert_clean()


@pytest.mark.parametrize("silent", [False, True])
def test_words_have_times_in_their_segments_order(folder: Path, listening: Listening, silent: bool) -> None:
    listener = listening(folder)
    sound = torch.full((NUM_MELS, 250), -1.0) if silent else mel(250, 3)
    plain, timed = listener.hear((sound, options_of()), (sound, options_of(words=True)))
    assert timed.text == plain.text
    assert [s.text for s in timed.segments] == ["".join(w.text for w in s.words) for s in timed.segments]
    for segment in timed.segments:
        times = [t for word in segment.words for t in (word.start_s, word.end_s)]
        assert times == sorted(times)
        assert all(segment.start_s <= t <= segment.end_s <= 2.5 for t in times)
    assert not any(segment.words for segment in plain.segments)
    assert any(segment.words for segment in timed.segments)
    listener.assert_clean()


@pytest.mark.parametrize("seed", range(8))
def test_words_stay_in_their_segments_wherever_attention_lays_them(
    ladder: WhisperTranscriber, seed: int
) -> None:
    """On silence what is attended to says nothing of when something was said: any order of positions that
    never goes back, against any segments that do not overlap."""
    draw = random.Random(seed)
    generation = ladder.generation
    recognition = ladder.start(options_of(words=True, temperature=0.5), WINDOW_FRAMES, 1.5)
    assert recognition.next_ask() is not None
    bounds = sorted(draw.choices(range(WINDOW_POSITIONS), k=8))
    ids = [generation.first_timestamp]
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        ids += [generation.first_timestamp + start] * (len(ids) > 1)
        ids += [*ladder.tokenizer.encode(" well then, so"), generation.first_timestamp + end]
    said = answer(ladder, "", -0.1)
    ids.append(generation.eos_token_id)
    logprobs = tuple(said.logprobs[:1]) * len(ids)
    recognition.take(msgspec.structs.replace(said, token_ids=tuple(ids), logprobs=logprobs))
    ask = recognition.next_ask()
    assert ask is not None
    assert ask.align is not None
    laid = sorted(draw.choices(range(WINDOW_POSITIONS), k=ask.align.num_tokens))
    events = recognition.take(msgspec.structs.replace(said, alignment=tuple(laid)))
    segments = [event for event in events if isinstance(event, TranscriptSegment)]
    assert len(segments) == 4
    assert all(segment.words for segment in segments)
    for segment in segments:
        assert all(segment.start_s <= w.start_s <= w.end_s <= segment.end_s for w in segment.words)
    times = [t for segment in segments for word in segment.words for t in (word.start_s, word.end_s)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("language", "tokens", "words"),
    [
        ("en", [" He", "llo", ",", " wor", "ld", "!"], [" Hello,", " world!"]),
        ("en", [" it", "'s", " (", "so", ")", "."], [" it's", " (so)."]),
        ("en", [" caf", b"\xc3", b"\xa9", " a"], [" café", " a"]),
        ("en", [' "', "yes", '"', " 5", "%"], [' "yes"', " 5", "%"]),
        ("ja", [b"\xe6\x97", b"\xa5", "本", "。"], ["日", "本。"]),
        ("en", [b"\xff", " a"], ["\ufffd", " a"]),
        ("en", [" a", b"\xc3"], [" a\ufffd"]),
    ],
)
def test_words_are_cut_where_a_reader_would(
    language: str, tokens: list[str | bytes], words: list[str]
) -> None:
    data = [t if isinstance(t, bytes) else t.encode() for t in tokens]
    cut = words_of(range(len(data)), data.__getitem__, language)
    assert [text for text, _ in cut] == words
    assert sum(count for _, count in cut) == len(tokens)
