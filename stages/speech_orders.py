"""From what a client wants spoken to the order for the graph: the voice, the talker's sampling, the
bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil

import msgspec

from contracts.errors import BadRequest, TooManyRequests
from contracts.messages import Audio
from contracts.params import SamplingParams
from contracts.specs import SpeechSpec
from stages.deployment import Deployment, ServerConfig
from stages.service import SpeechOptions
from stages.speech_flow import SpeechOrder, anything

TALKER_SEED = 0x5BEEC4  # so that text and speech of one seed do not draw the same numbers


def check_speech(
    spec: SpeechSpec | None, options: SpeechOptions, sampling: SamplingParams, model: str
) -> None:
    """Raises BadRequest, before any work is done for the request."""
    if spec is None:
        raise BadRequest(
            f"{model} answers with text only, it has no voice",
            param="modalities",
            code="unsupported_modality",
        )
    if sampling.n != 1:
        raise BadRequest(f"n must be 1 with audio output, not {sampling.n}", param="n")
    voice_named(spec, options.voice)
    if options.verbatim is not None and not options.verbatim.strip():
        raise BadRequest("there is no text to speak", param="input")


class SpeechDesk:
    """Takes the orders of speech of one model and counts what became of them."""

    def __init__(
        self,
        spec: SpeechSpec | None,
        deployment: Deployment,
        model: str,
        can_be_said: Callable[[Sequence[int]], bool] = anything,
    ) -> None:
        """`can_be_said`: whether there is anything to speak in these tokens of an answer."""
        self._spec, self._can_be_said = spec, can_be_said
        self._server = deployment.server
        self._model = model
        self._max_speaking = min((v.max_streams for v in deployment.vocoders.values()), default=0)
        self._num_speaking = 0
        self._num_ended = 0
        self._num_cut = 0

    @contextlib.contextmanager
    def admitted(self, options: SpeechOptions | None, sampling: SamplingParams) -> Iterator[None]:
        """Raises BadRequest or TooManyRequests, before any work is done for the request; no options, no
        speech."""
        if options is None:
            yield
            return
        check_speech(self._spec, options, sampling, self._model)
        if self._num_speaking >= self._max_speaking:
            raise TooManyRequests(
                f"{self._max_speaking} answers are being spoken already; try again later", retry_after_s=1.0
            )
        self._num_speaking += 1
        try:
            yield
        finally:
            self._num_speaking -= 1

    def order(self, options: SpeechOptions | None, sampling: SamplingParams) -> SpeechOrder | None:
        if options is None:
            return None
        assert self._spec is not None, "admitted"
        order = speech_order(self._spec, self._server, options, sampling)
        return replace(order, can_be_said=self._can_be_said)

    def count(self, audio: Audio) -> None:
        self._num_ended += audio.finish_reason is not None
        self._num_cut += audio.finish_reason == "length"

    def stats(self) -> dict[str, float]:
        if self._spec is None:
            return {}
        return {
            "num_speaking": float(self._num_speaking),
            "speeches_total": float(self._num_ended),
            "speeches_cut_total": float(self._num_cut),
        }


def voice_named(spec: SpeechSpec, name: str | None) -> str:
    """The voice as the model spells it; None is its default. Raises BadRequest naming all of them."""
    if name is None:
        return spec.voices[0]
    for voice in spec.voices:
        if voice.lower() == name.lower():
            return voice
    shown = name if len(name) <= 40 else name[:40] + "…"
    raise BadRequest(
        f"there is no voice {shown!r}; there are {', '.join(spec.voices)}",
        param="voice",
        code="unknown_voice",
    )


def speech_order(
    spec: SpeechSpec, server: ServerConfig, options: SpeechOptions, sampling: SamplingParams
) -> SpeechOrder:
    """`sampling`: of the text, complete; the talker's draws have a seed derived from its."""
    assert sampling.seed is not None
    talker = options.sampling if options.sampling is not None else spec.sampling
    seed = talker.seed if talker.seed is not None else sampling.seed ^ TALKER_SEED
    last_bound = ceil(server.max_speech_s * spec.frames_per_s)
    max_frames = min(spec.max_frames_of(sampling.max_tokens), last_bound)
    return SpeechOrder(
        voice=voice_named(spec, options.voice),
        sampling=msgspec.structs.replace(talker, seed=seed, n=1, max_tokens=max_frames),
        max_frames=max_frames,
        window_frames=max(1, ceil(server.audio_window_s * spec.frames_per_s)),
        samples_per_frame=spec.samples_per_frame,
        frames_of_text=spec.max_frames_of,
    )
