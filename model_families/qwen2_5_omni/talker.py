"""Qwen2.5-Omni's talker: the thinker's states and words in, one code a frame out.

Shapes: P prompt rows, X hidden of the thinker (and width of an input row), H hidden of the talker, K text
tokens, T rows of a step, S sampling rows.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from contracts.errors import BadRequest
from contracts.media import Prompt
from contracts.params import SamplingParams
from lm_engine.decoder import DecoderStack
from lm_engine.layers.kernels import Kernels
from lm_engine.layers.selection import select_kernels
from lm_engine.model import AttentionBackend, AttentionMetadata, DecoderConfig, PagedKV
from lm_engine.model import Kernels as KernelChoice
from lm_engine.talker.model import Draw, Ints, Speller, TalkerConfig, TalkerPrompt, as_written
from lm_engine.transfer import to_device
from model_families.checkpoint import checkpoint_error, read_config
from model_families.decoder_weights import TextTensors
from model_families.dummy_weights import open_checkpoint
from model_families.fields import Count
from model_families.processing import Processor
from model_families.qwen2_5_omni.speakers import read_speakers
from model_families.talker_weights import talker_name
from model_families.text_config import CheckpointConfig, FamilyDefaults, build_decoder_config

DEFAULTS = FamilyDefaults(
    rope_theta=1_000_000.0,
    head_dim=128,
    qkv_bias=True,
    mrope_section=(16, 24, 24),
    max_window_layers=28,
    sliding_window=32768,
)
SAMPLING = SamplingParams(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05)


class TalkerSection(CheckpointConfig, frozen=True, kw_only=True):
    embedding_size: int = 3584
    audio_token_index: int = 151646
    image_token_index: int = 151655
    video_token_index: int = 151656
    tts_text_end_token_id: int = 151861
    tts_text_pad_token_id: int = 151859
    tts_codec_start_token_id: int = 8293
    tts_codec_end_token_id: int = 8294
    tts_codec_pad_token_id: int = 8292
    tts_codec_mask_token_id: int = 8296

    @property
    def media_tokens(self) -> tuple[int, int, int]:
        return self.audio_token_index, self.image_token_index, self.video_token_index


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab_size: Count = 152064


class _ThinkerSection(msgspec.Struct, frozen=True):
    text_config: _Vocabulary = _Vocabulary()


class OmniSections(msgspec.Struct, frozen=True):
    talker_config: TalkerSection
    thinker_config: _ThinkerSection = _ThinkerSection()


class Talker:
    """Implements `TalkerModel`. A row is a hidden state plus an embedding, both of the thinker's width."""

    def __init__(
        self,
        section: TalkerSection,
        config: TalkerConfig,
        source: TextTensors,
        kernels: Kernels,
        voices: dict[str, int],
        processor: Processor,
    ) -> None:
        self.config = config
        self.dtype, self.device = source.dtype, source.device
        self.attention = kernels.attention
        self.text_table_VW: Tensor | None = None  # hidden states are part of the rows
        self._section, self._voices, self._processor = section, voices, processor
        decoder, width = config.decoder, config.hidden_width
        self._stack = DecoderStack(decoder, source, kernels)
        self._text_table_VX = source.take("text_embed.weight", (config.text_vocab_size, width))
        self._code_table_CX = source.take("embed.weight", (decoder.vocab_size, width))
        self._projection = kernels.pack_linear(
            source.take("projection.weight", (decoder.hidden_size, width)),
            source.take("projection.bias", (decoder.hidden_size,)),
        )
        head_CH = source.take("head.weight", (decoder.vocab_size, decoder.hidden_size))
        self._head = kernels.pack_linear(head_CH, float32_output=True)

    def lay_out(self, prompt: Prompt, voice: str) -> TalkerPrompt:
        """The whole prompt of the thinker, the voice's opening token, the first token of text."""
        if voice not in self._voices:
            known = ", ".join(self._voices)
            raise BadRequest(f"voice {voice!r} is not one of {known}", param="voice", code="unknown_voice")
        section, ids = self._section, np.array(prompt.token_ids, dtype=np.int64)
        positions_AL, delta = self._processor.positions(prompt)
        tail_A2 = np.broadcast_to(np.arange(len(ids), len(ids) + 2) + delta, (len(positions_AL), 2))
        return TalkerPrompt(
            token_ids=ids,
            is_media=np.isin(ids, section.media_tokens),
            hidden_positions=np.arange(len(ids)),
            voice=self._voices[voice],
            codes=[section.tts_codec_mask_token_id] * len(ids)
            + [section.tts_codec_pad_token_id, section.tts_codec_start_token_id],
            positions_AP=np.concatenate([positions_AL, tail_A2], axis=1),
            position_delta=delta,
        )

    def speller(self) -> Speller:
        return as_written

    def reserve(self, max_sequences: int) -> None:
        """One code a frame: nothing to predict."""

    def prompt_rows(
        self, prompt: TalkerPrompt, hidden_NX: Tensor, first_token: int, first_hidden_1X: Tensor | None
    ) -> Tensor:
        assert first_hidden_1X is not None
        heard_PX = self._embed_text(prompt.token_ids)
        media_N = to_device(np.flatnonzero(prompt.is_media), self.device)
        heard_PX = heard_PX.index_fill(0, media_N, 0.0)
        heard_PX = heard_PX + self._cast(hidden_NX)
        voice_1X = self._embed_text([prompt.voice])
        first_1X = self._embed_text([first_token]) + self._cast(first_hidden_1X)
        pad_start = np.array(prompt.codes[-2:], dtype=np.int64)
        pad_start_2X = self._embed_codes(to_device(pad_start, self.device))
        return torch.cat([heard_PX, torch.cat([voice_1X, first_1X]) + pad_start_2X])

    def text_rows(self, token_ids_K: Tensor, hidden_KX: Tensor | None) -> Tensor:
        assert hidden_KX is not None
        embedded_KX = functional.embedding(token_ids_K, self._text_table_VX)
        return embedded_KX.to(self._stack.activation_dtype) + self._cast(hidden_KX)

    def closing_rows(self) -> Tensor:
        return self._embed_text([self._section.tts_text_end_token_id, self._section.tts_text_pad_token_id])

    def frame_rows(self, codes_RQ: Tensor) -> Tensor:
        return self._embed_codes(codes_RQ[:, 0])

    def forward(
        self,
        rows_TW: Tensor,
        positions_AT: Tensor,
        kv: PagedKV,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
    ) -> Tensor:
        return self._stack.forward(self._projection(rows_TW), positions_AT, kv, attention, metadata)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return self._head(hidden_SH)

    def complete(self, hidden_SH: Tensor, code_S: Tensor, draw: Draw) -> Tensor:
        return code_S[:, None]

    def _embed_text(self, token_ids: Ints | list[int]) -> Tensor:
        ids = to_device(np.array(token_ids, dtype=np.int64), self.device)
        return functional.embedding(ids, self._text_table_VX).to(self._stack.activation_dtype)

    def _embed_codes(self, codes_R: Tensor) -> Tensor:
        return functional.embedding(codes_R, self._code_table_CX).to(self._stack.activation_dtype)

    def _cast(self, hidden_X: Tensor) -> Tensor:
        return hidden_X.to(self._stack.activation_dtype)


def read_talker_config(folder: Path) -> tuple[TalkerSection, TalkerConfig]:
    sections = read_config(folder, OmniSections)
    section = sections.talker_config
    decoder: DecoderConfig = build_decoder_config(section, DEFAULTS)
    control = (section.tts_codec_end_token_id, section.tts_codec_pad_token_id)
    if max(*control, section.tts_codec_start_token_id, section.tts_codec_mask_token_id) >= decoder.vocab_size:
        raise checkpoint_error("config.json: the talker's control codes lie outside its vocab_size")
    return section, TalkerConfig(
        decoder=decoder,
        num_code_groups=1,
        hidden_width=section.embedding_size,
        text_hidden=True,
        text_vocab_size=sections.thinker_config.text_config.vocab_size,
        end_codes=(section.tts_codec_pad_token_id, section.tts_codec_end_token_id),
        suppressed_codes=(section.tts_codec_start_token_id,),
        residual=SAMPLING,
    )


def load_talker(
    folder: Path, processor: Processor, device: torch.device, dtype: torch.dtype, kernels: KernelChoice
) -> Talker:
    """Raises EngineError naming the tensor when one is missing, mis-shaped or unknown."""
    section, config = read_talker_config(folder)
    voices = {name: speaker.bos_token for name, speaker in read_speakers(folder).items()}
    with open_checkpoint(folder) as checkpoint:
        source = TextTensors(checkpoint, talker_name, device, dtype)
        chosen = select_kernels(kernels, device, dtype)
        talker = Talker(section, config, source, chosen, voices, processor)
        source.check_all_taken()
    return talker
