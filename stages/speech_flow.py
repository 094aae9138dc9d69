"""SpeechFlow: what a request's spoken answer may still produce, and what of it the client has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.media import Prompt
from contracts.messages import Audio, FinishReason, Grant, Speak, Vocode
from contracts.params import SamplingParams

SAMPLE_BYTES = 4


def anything(token_ids: Sequence[int]) -> bool:
    return len(token_ids) > 0


@dataclass(frozen=True)
class SpeechOrder:
    """A spoken answer as the service orders it. `max_frames`: the talker's reservation and last bound;
    `frames_of_text`: the bound once the answer's text is known, from its number of tokens; `can_be_said`:
    whether there is anything in it to be heard."""

    voice: str
    sampling: SamplingParams
    max_frames: int
    window_frames: int
    samples_per_frame: int
    frames_of_text: Callable[[int], int]
    can_be_said: Callable[[Sequence[int]], bool] = anything


class SpeechFlow:
    """Grants follow the client: it may be `window_frames` behind, no more is made.

    0 ──────── taken by the client ── queued here, in the vocoder, in the talker ── granted
                        └──────────────────── window_frames ───────────────────────┘
    """

    def __init__(self, order: SpeechOrder) -> None:
        self._order = order
        self._bound = order.max_frames
        self._text_ended = False
        self._num_taken = 0  # samples
        self._num_received = 0  # samples
        self._granted = self._wanted()
        self._final_granted = False
        self.finish: FinishReason | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None

    def speak(self, request_id: str, prompt: Prompt) -> Speak:
        order = self._order
        return Speak(
            request_id=request_id,
            prompt=prompt,
            voice=order.voice,
            sampling=order.sampling,
            max_frames=self._bound,
            granted_frames=self._granted,
        )

    def vocode(self, request_id: str) -> Vocode:
        order = self._order
        assert order.sampling.seed is not None
        return Vocode(
            request_id=request_id,
            voice=order.voice,
            seed=order.sampling.seed,
            skip_samples=self._num_received,
        )

    def grant_again(self, request_id: str) -> Grant | None:
        """For a replay: Speak cannot say that its grant is the last."""
        return Grant(request_id, self._granted, True, self._most) if self._final_granted else None

    @property
    def _most(self) -> int | None:
        """Frames that it may come to, once that is known."""
        return self._bound if self._text_ended else None

    def left_unsaid(self, token_ids: Sequence[int]) -> bool:
        """It has ended without a sample, though these tokens of its text were to be heard."""
        return self.ended and self._num_received == 0 and self._order.can_be_said(token_ids)

    def received(self, audio: Audio) -> None:
        assert not self.ended, f"{audio.request_id}: audio after its end"
        assert len(audio.pcm) % SAMPLE_BYTES == 0, f"{audio.request_id}: {len(audio.pcm)} bytes of PCM"
        self._num_received += len(audio.pcm) // SAMPLE_BYTES
        self.finish = audio.finish_reason

    def taken(self, request_id: str, audio: Audio) -> Grant | None:
        """The client took `audio`: the grant that this allows, if it is worth a message."""
        self._num_taken += len(audio.pcm) // SAMPLE_BYTES
        return self._raise_grant(request_id, at_least=max(1, self._order.window_frames // 8))

    def text_ended(self, request_id: str, num_tokens: int) -> Grant | None:
        """From here on the bound is known; it may be below what was granted, never below what a talker that
        takes one text token a frame can have produced."""
        at_least = 1
        if not self._text_ended:
            self._text_ended = True
            self._bound = min(self._bound, self._order.frames_of_text(num_tokens))
            at_least = 0  # the talker is to hear of it, whatever is granted
        return self._raise_grant(request_id, at_least)

    def _wanted(self) -> int:
        taken_frames = self._num_taken // self._order.samples_per_frame
        return min(taken_frames + self._order.window_frames, self._bound)

    def _raise_grant(self, request_id: str, at_least: int) -> Grant | None:
        wanted = self._wanted()
        final = self._text_ended and wanted == self._bound
        news = (final and not self._final_granted) or wanted - self._granted >= at_least
        if self.ended or not news:
            return None
        self._granted, self._final_granted = wanted, final
        return Grant(request_id, wanted, final, self._most)
