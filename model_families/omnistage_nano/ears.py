"""omnistage-nano's ears: Whisper's encoder grown by two layers, which spells what it hears, letter by letter.

A list of words beside the checkpoint, where there is one, corrects the spelling. What the language model gets
are its own words of those letters, at the end of the rows that the sound takes up; the rows before them are
zeros. It reads them as it reads text, so that none of its weights had to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from contracts.specs import MediaSpecs
from encoder_pool.model import EncoderModel
from model_families.audio.audio_spec import qwen2_5_omni_spec, read_feature_config
from model_families.audio.encoder import load_audio_encoder
from model_families.omni.config import read_thinker_config
from model_families.omni.weights import thinker_audio_name
from model_families.omnistage_nano.letters import NUM_LETTERS, read_letters
from model_families.omnistage_nano.lexicon import Lexicon, Speller
from model_families.qwen2_5_omni.audio_encoder import AudioRows, Qwen25OmniAudioConfig, Qwen25OmniEars
from model_families.qwen2_5_omni.audio_weights import MODULES
from model_families.vision.attention import PackedAttention, select_attention

HEARD_WORDS = "heard_words.txt"  # in lower case, one a line, the commonest first
WORDS = "thinker.model.embed_tokens.weight"
_MODULES = {theirs: ours for theirs, ours in MODULES.items() if theirs != "proj"} | {"spell": "letters"}


class _Words(msgspec.Struct, frozen=True):
    vocab_size: int


class _Text(msgspec.Struct, frozen=True):
    text_config: _Words


class NanoEars(AudioRows):
    def __init__(
        self,
        config: Qwen25OmniAudioConfig,
        attention: PackedAttention,
        tokenizer: Tokenizer,
        num_words: int,
        speller: Speller | None = None,
    ) -> None:
        super().__init__(config, attention)
        self.letters = nn.Linear(config.d_model, NUM_LETTERS)
        self.words = nn.Embedding(num_words, config.output_dim)
        self._tokenizer = tokenizer
        self._speller = speller

    def spelled(self, features: Sequence[Tensor]) -> list[str]:
        x_NW, num_rows = self.rows(features)
        logits = self.letters(self.norm(x_NW))
        if self._speller is None:
            return [read_letters(part.tolist()) for part in logits.argmax(-1).cpu().split(num_rows.tolist())]
        chances = logits.float().log_softmax(-1).cpu()
        return [self._speller(part.numpy()) for part in chances.split(num_rows.tolist())]

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        halves = [(mel.shape[1] - 1) // 2 + 1 for mel in features]
        texts = self.spelled(features)
        return torch.cat([self._read(text, rows // 2) for text, rows in zip(texts, halves, strict=True)])

    def _read(self, text: str, num_tokens: int) -> Tensor:
        """[num_tokens, words' width]."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids[:num_tokens]
        table = self.words.weight
        read = table.new_zeros(num_tokens, table.shape[1])
        if ids:
            read[num_tokens - len(ids) :] = self.words(torch.tensor(ids, device=table.device))
        return read


def ears_name(name: str) -> str | None:
    return "words.weight" if name == WORDS else thinker_audio_name(name, _MODULES)


def read_words(path: Path) -> Lexicon:
    return Lexicon(path.read_text(encoding="ascii").split())


def open_ears(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> NanoEars:
    return _load(folder, specs, device, dtype)[0]


def load_ears(folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype) -> EncoderModel:
    return _load(folder, specs, device, dtype)[1]


def _load(
    folder: Path, specs: MediaSpecs, device: torch.device, dtype: torch.dtype
) -> tuple[NanoEars, EncoderModel]:
    config = read_thinker_config(folder, Qwen25OmniEars).audio_config
    words = read_thinker_config(folder, _Text).text_config
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    attention = select_attention(device, dtype, config.head_dim)
    speller = Speller(read_words(folder / HEARD_WORDS)) if (folder / HEARD_WORDS).exists() else None
    with torch.device("meta"):
        ears = NanoEars(config, attention, tokenizer, words.vocab_size, speller)
    spec = specs.audio or qwen2_5_omni_spec(read_feature_config(folder))  # none: deaf, and never asked
    model = load_audio_encoder("omnistage_nano", folder, ears, config, spec, ears_name, device, dtype)
    return ears, model
