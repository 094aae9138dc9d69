"""Qwen3-Omni's talker: the user's turns and the answer's words in, frames of several codes out.

Shapes: P prompt rows, X hidden of the thinker, H hidden of the talker (and width of an input row), K text
tokens, T rows of a step, R sequences of it, S of them sampling, Q code groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from contracts.errors import BadRequest
from contracts.media import Prompt
from contracts.params import SamplingParams
from lm_engine.decoder import DecoderStack, WeightSource
from lm_engine.layers.kernels import Kernels, Linear
from lm_engine.layers.selection import select_kernels
from lm_engine.model import AttentionBackend, AttentionMetadata, DecoderConfig, PagedKV
from lm_engine.model import Kernels as KernelChoice
from lm_engine.talker.model import Draw, Ints, Speller, TalkerConfig, TalkerPrompt, as_written
from lm_engine.talker.predictor import CodePredictor
from lm_engine.transfer import to_device
from model_families.checkpoint import checkpoint_error, read_config
from model_families.decoder_weights import TextTensors
from model_families.dummy_weights import open_checkpoint
from model_families.fields import Count
from model_families.processing import Processor
from model_families.talker_weights import Under, talker_name
from model_families.text_config import CheckpointConfig, FamilyDefaults, MoeDefaults, build_decoder_config

DEFAULTS = FamilyDefaults(
    rope_theta=1_000_000.0,
    qk_norm=True,
    mrope_section=(24, 20, 20),
    mrope_interleaved=True,
    intermediate_size=2048,
    moe=MoeDefaults(num_experts=128, num_chosen=8, intermediate_size=384, normalise=False, has_shared=True),
)
PREDICTOR_DEFAULTS = FamilyDefaults(rope_theta=1_000_000.0, head_dim=128, qk_norm=True)
SAMPLING = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
RESIDUAL = SamplingParams(temperature=1.0, top_k=50, top_p=0.8)
NUM_CONTROL_CODES = 1024  # the last of the vocabulary: no sound, never drawn, but for the end
HEADER = 3  # <|im_start|>, assistant, newline
PROJECTED_AT_ONCE = 16384
NUM_PADS = 4  # rows between the header and the text's own start


class TalkerSection(msgspec.Struct, frozen=True, kw_only=True):
    text_config: CheckpointConfig
    code_predictor_config: CheckpointConfig
    num_code_groups: Count = 32
    thinker_hidden_size: Count = 2048
    codec_eos_token_id: int = 4198
    codec_nothink_id: int = 4203
    codec_think_bos_id: int = 4204
    codec_think_eos_id: int = 4205
    codec_pad_id: int = 4196
    codec_bos_id: int = 4197
    audio_token_id: int = 151646
    image_token_id: int = 151655
    video_token_id: int = 151656
    speaker_id: dict[str, int] = {}

    @property
    def media_tokens(self) -> tuple[int, int, int]:
        return self.audio_token_id, self.image_token_id, self.video_token_id

    def opening_codes(self, voice: int) -> list[int]:
        """Heard beside the last rows of the prompt: no thinking, this voice, begin."""
        think = [self.codec_nothink_id, self.codec_think_bos_id, self.codec_think_eos_id]
        return [*think, voice, self.codec_pad_id, self.codec_bos_id]


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab_size: Count = 152064


class _ThinkerSection(msgspec.Struct, frozen=True):
    text_config: _Vocabulary = _Vocabulary()


class OmniSections(msgspec.Struct, frozen=True, kw_only=True):
    talker_config: TalkerSection
    thinker_config: _ThinkerSection = _ThinkerSection()
    im_start_token_id: int = 151644
    tts_pad_token_id: int = 151671
    tts_bos_token_id: int = 151672
    tts_eos_token_id: int = 151673
    user_token_id: int = 872
    assistant_token_id: int = 77091


class Projection:
    """Two linears with a SiLU between, from the thinker's width to the talker's."""

    def __init__(self, source: WeightSource, kernels: Kernels, sizes: tuple[int, int, int]) -> None:
        inputs, inner, outputs = sizes

        def linear(name: str, shape: tuple[int, int]) -> Linear:
            weight_OI = source.take(f"{name}.weight", shape)
            return kernels.pack_linear(weight_OI, source.take(f"{name}.bias", shape[:1]))

        self._first, self._second = linear("fc1", (inner, inputs)), linear("fc2", (outputs, inner))

    def __call__(self, x_KX: Tensor) -> Tensor:
        return self._second(functional.silu(self._first(x_KX)))


class Talker:
    """Implements `TalkerModel`. A row is a projected text embedding (or, in the prompt, a projected hidden
    state of the thinker) of the talker's own width."""

    def __init__(
        self,
        sections: OmniSections,
        config: TalkerConfig,
        source: WeightSource,
        kernels: Kernels,
        predictor: CodePredictor,
        processor: Processor,
    ) -> None:
        self.config = config
        self.dtype, self.device = source.dtype, source.device
        self.attention = kernels.attention
        self._sections, self._section = sections, sections.talker_config
        self._predictor, self._processor = predictor, processor
        decoder, width = config.decoder, config.hidden_width
        self._stack = DecoderStack(decoder, source, kernels)
        self._text_table_VX = source.take("text_embed.weight", (config.text_vocab_size, width))
        sizes = (width, decoder.intermediate_size, decoder.hidden_size)
        self._text = Projection(Under(source, "text."), kernels, sizes)
        self._hidden = Projection(Under(source, "hidden."), kernels, sizes)
        codes = (decoder.vocab_size, decoder.hidden_size)
        self._code_table_CH = source.take("embed.weight", codes)
        self._head = kernels.pack_linear(source.take("head.weight", codes), float32_output=True)
        self.text_table_VW: Tensor | None = None
        if self.device.type == "cuda":
            self.text_table_VW = self._text_table_VX = self._project_all()  # the embeddings are not kept

    @torch.inference_mode()
    def _project_all(self) -> Tensor:
        """Once, at the start: then a row of text takes no launch."""
        parts = torch.split(self._text_table_VX, PROJECTED_AT_ONCE)
        return torch.cat([self._text(part_KX.to(self._stack.activation_dtype)) for part_KX in parts])

    def lay_out(self, prompt: Prompt, voice: str) -> TalkerPrompt:
        """The user's turns, the head of the answer's, the voice, the first token of text."""
        sections, section = self._sections, self._section
        if voice.lower() not in section.speaker_id:
            known = ", ".join(section.speaker_id)
            raise BadRequest(f"voice {voice!r} is not one of {known}", param="voice", code="unknown_voice")
        ids = np.array(prompt.token_ids, dtype=np.int64)
        kept, answer = find_turns(ids, sections)
        num_rows = len(kept) + HEADER + NUM_PADS + 2
        heard = np.concatenate([ids[kept], ids[answer : answer + HEADER]])
        is_media = np.isin(heard, section.media_tokens)
        positions_AP, delta = self._processor.positions(_reduced(prompt, kept, num_rows, sections))
        return TalkerPrompt(
            token_ids=heard,
            is_media=is_media,
            hidden_positions=kept[is_media[: len(kept)]],
            voice=section.speaker_id[voice.lower()],
            codes=[self.config.suppressed_codes[0]] * num_rows,  # penalties do not reach what is never drawn
            positions_AP=positions_AP,
            position_delta=delta,
            leading_text=tuple(ids[answer + HEADER :].tolist()),
        )

    def speller(self) -> Speller:
        return as_written

    def reserve(self, max_sequences: int) -> None:
        self._predictor.reserve(max_sequences)

    def prompt_rows(
        self, prompt: TalkerPrompt, hidden_NX: Tensor, first_token: int, first_hidden_1X: Tensor | None
    ) -> Tensor:
        sections = self._sections
        heard_PH = self._project_text(prompt.token_ids)
        if len(hidden_NX):
            seen_NH = self._hidden(hidden_NX.to(self._stack.activation_dtype))
            media_N = to_device(np.flatnonzero(prompt.is_media), self.device)
            heard_PH = heard_PH.index_copy(0, media_N, seen_NH)
        pads = [sections.tts_pad_token_id] * NUM_PADS
        text_NH = self._project_text([*pads, sections.tts_bos_token_id, first_token])
        opening = np.array(self._section.opening_codes(prompt.voice), dtype=np.int64)
        return torch.cat([heard_PH, text_NH + self._embed_codes(to_device(opening, self.device))])

    def text_rows(self, token_ids_K: Tensor, hidden_KX: Tensor | None) -> Tensor:
        if self.text_table_VW is not None:
            return functional.embedding(token_ids_K, self.text_table_VW)
        embedded_KX = functional.embedding(token_ids_K, self._text_table_VX)
        return self._text(embedded_KX.to(self._stack.activation_dtype))

    def closing_rows(self) -> Tensor:
        return self._project_text([self._sections.tts_eos_token_id, self._sections.tts_pad_token_id])

    def frame_rows(self, codes_RQ: Tensor) -> Tensor:
        return self._embed_codes(codes_RQ[:, 0]) + self._predictor.embed_all(codes_RQ[:, 1:])

    def forward(
        self,
        rows_TW: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
    ) -> Tensor:
        return self._stack.forward(rows_TW, positions_AT, kv, attention, metadata)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return self._head(hidden_SH)

    def complete(self, hidden_SH: Tensor, code_S: Tensor, draw: Draw) -> Tensor:
        return self._predictor.complete(hidden_SH, self._embed_codes(code_S), code_S, draw)

    def _project_text(self, token_ids: Ints | list[int]) -> Tensor:
        ids = to_device(np.array(token_ids, dtype=np.int64), self.device)
        return self.text_rows(ids, None)

    def _embed_codes(self, codes_R: Tensor) -> Tensor:
        return functional.embedding(codes_R, self._code_table_CH).to(self._stack.activation_dtype)


def find_turns(ids: Ints, sections: OmniSections) -> tuple[Ints, int]:
    """Positions of the user's turns, with their marks; and where the answer's turn, the last one, begins.

    Raises BadRequest for a prompt that does not end in an open turn of the assistant.
    """
    index = np.arange(len(ids))
    starts = ids == sections.im_start_token_id
    turn = np.maximum(np.maximum.accumulate(np.where(starts, index, -1)), 0)
    role = ids[np.minimum(turn + 1, len(ids) - 1)]
    following = np.append(ids[1:], -1)
    answers = np.flatnonzero(starts & (following == sections.assistant_token_id))
    if len(answers) == 0 or answers[-1] + HEADER > len(ids):
        raise BadRequest("audio is spoken for the assistant's turn; the prompt opens none", param="messages")
    return np.flatnonzero(role == sections.user_token_id), int(answers[-1])


def _reduced(prompt: Prompt, kept: Ints, num_rows: int, sections: OmniSections) -> Prompt:
    """What the talker hears, as a prompt, for its positions: media spans where they moved to."""
    ids = np.array(prompt.token_ids, dtype=np.int64)[kept]
    tail = [sections.tts_pad_token_id] * (num_rows - len(kept))
    spans = []
    for span in prompt.spans:
        first = int(np.searchsorted(kept, span.offset))
        if first < len(kept) and kept[first] == span.offset:
            assert kept[first + span.length - 1] == span.end - 1, "a media span reaches over a turn's end"
            spans.append(msgspec.structs.replace(span, offset=first))
    return Prompt([*ids.tolist(), *tail], prompt.items, tuple(spans))


def read_talker_config(folder: Path) -> tuple[OmniSections, TalkerConfig, DecoderConfig]:
    """Also the code predictor's."""
    sections = read_config(folder, OmniSections)
    section = sections.talker_config
    decoder = build_decoder_config(section.text_config, DEFAULTS)
    predictor = build_decoder_config(section.code_predictor_config, PREDICTOR_DEFAULTS)
    if predictor.hidden_size != decoder.hidden_size:
        raise checkpoint_error("the talker and its code predictor differ in hidden_size")
    control = range(max(decoder.vocab_size - NUM_CONTROL_CODES, 0), decoder.vocab_size)
    voices = section.speaker_id.values()
    if not all(0 <= code < decoder.vocab_size for code in (*section.opening_codes(0), *voices)):
        raise checkpoint_error("config.json: the talker's control codes lie outside its vocab_size")
    return (
        sections,
        TalkerConfig(
            decoder=decoder,
            num_code_groups=section.num_code_groups,
            hidden_width=section.thinker_hidden_size,
            text_hidden=False,
            text_vocab_size=sections.thinker_config.text_config.vocab_size,
            end_codes=(section.codec_eos_token_id,),
            suppressed_codes=tuple(code for code in control if code != section.codec_eos_token_id),
            residual=RESIDUAL,
        ),
        predictor,
    )


def load_talker(
    folder: Path,
    processor: Processor,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice,
    residual: SamplingParams = RESIDUAL,
    kind: Callable[
        [OmniSections, TalkerConfig, WeightSource, Kernels, CodePredictor, Processor], Talker
    ] = Talker,
) -> Talker:
    """Raises EngineError naming the tensor when one is missing, mis-shaped or unknown."""
    sections, config, inner = read_talker_config(folder)
    config = replace(config, residual=residual)
    with open_checkpoint(folder) as checkpoint:
        source = TextTensors(checkpoint, talker_name, device, dtype)
        predictor = load_predictor(inner, config, source, select_kernels(kernels, device, dtype))
        chosen = select_kernels(kernels, device, dtype)
        talker = kind(sections, config, source, chosen, predictor, processor)
        source.check_all_taken()
    return talker


def load_predictor(
    inner: DecoderConfig, config: TalkerConfig, source: WeightSource, kernels: Kernels
) -> CodePredictor:
    part, shape = Under(source, "predictor."), (inner.vocab_size, inner.hidden_size)
    groups = range(config.num_code_groups - 1)
    tables = [part.take(f"embed.{group}.weight", shape) for group in groups]
    heads = [
        kernels.pack_linear(part.take(f"head.{group}.weight", shape), float32_output=True) for group in groups
    ]
    return CodePredictor(DecoderStack(inner, part, kernels), tables, heads)
