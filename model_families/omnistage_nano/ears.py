"""omnistage-nano's ears: Whisper's encoder grown by two layers, which spells what it hears, letter by letter.

A list of words beside the checkpoint, and a table of which follow which, correct the spelling where they are
there. What the language model gets
are its own words of those letters, at the end of the rows that the sound takes up, and again before them
where there are many: hundreds of empty rows were answered with nothing. It reads them as it reads text, so
that none of its weights had to change.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import exp, log
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from contracts.specs import AudioSpec, MediaSpecs
from encoder_pool.model import EncoderInput, EncoderModel
from model_families.audio.audio_spec import qwen2_5_omni_spec, read_feature_config
from model_families.audio.encoder import AudioEncoder, load_audio_encoder
from model_families.checkpoint import checkpoint_error
from model_families.omni.config import read_thinker_config
from model_families.omni.weights import thinker_audio_name
from model_families.omnistage_nano.letters import FIRST_OF_WORDS, NUM_LETTERS, read_letters
from model_families.omnistage_nano.lexicon import Lexicon, Speller
from model_families.qwen2_5_omni.audio_encoder import (
    AudioRows,
    Qwen25OmniAudioConfig,
    Qwen25OmniEars,
    RowsLayout,
)
from model_families.qwen2_5_omni.audio_weights import MODULES
from model_families.vision.attention import PackedAttention, select_attention

HEARD_WORDS = "heard_words.txt"  # in lower case, one a line, the commonest first
# One line a word: it ("" is the beginning of a sentence), then its likeliest followers, each with the
# negative logarithm of its chance, in tenths; single spaces between.
HEARD_PAIRS = "heard_pairs.txt"
MAX_TENTHS = 200
# A letter must be as likely as this somewhere, or no word was said: in silence, noise and tones the likeliest
# comes to 0.3 (0.5 where they last 0.4 s at most), in words to 0.9, seldom less (a lone "A.": 0.46).
LEAST_CHANCE = 0.4
MOST_EMPTY = 100  # rows before the words, 4 s
NO_WORDS = "(The recording holds no words.)"  # what it reads then, and mostly repeats when asked
WORDS = "thinker.model.embed_tokens.weight"
_MODULES = {theirs: ours for theirs, ours in MODULES.items() if theirs != "proj"} | {"spell": "letters"}


class _Words(msgspec.Struct, frozen=True):
    vocab_size: int


class _Text(msgspec.Struct, frozen=True):
    text_config: _Words


class NanoEars(AudioRows):
    waits_for_device = True  # the text is written on the host

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
        """ "" where no word is heard."""
        return self._spelled(*self.stacked(features))

    def _spelled(self, mel_FM: Tensor, layout: RowsLayout) -> list[str]:
        chances = self.letters(self.norm(self.rows(mel_FM, layout))).float().log_softmax(-1).cpu()
        return [self._spell(part_RL) for part_RL in chances.split(layout.num_rows.tolist())]

    def _spell(self, chances_RL: Tensor) -> str:
        if chances_RL[:, FIRST_OF_WORDS:].max() < log(LEAST_CHANCE):
            return ""
        if self._speller is None:
            return read_letters(chances_RL.argmax(-1).tolist())
        return self._speller(chances_RL.numpy())

    def embed(self, mel_FM: Tensor, layout: RowsLayout) -> Tensor:
        texts = self._spelled(mel_FM, layout)
        sizes = [rows // 2 for rows in layout.num_rows.tolist()]
        return torch.cat([self._read(text, size) for text, size in zip(texts, sizes, strict=True)])

    def _read(self, text: str, num_tokens: int) -> Tensor:
        """[num_tokens, words' width]."""
        said, num_empty = (text, MOST_EMPTY) if text else (NO_WORDS, 0)
        ids, again = self._ids(said), self._ids(f" {said}")
        ids += again * (max(0, num_tokens - num_empty - len(ids)) // len(again))
        ids = ids[:num_tokens]
        table = self.words.weight
        read = table.new_zeros(num_tokens, table.shape[1])
        if ids:
            read[num_tokens - len(ids) :] = self.words(torch.tensor(ids, device=table.device))
        return read

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class NanoEncoder(AudioEncoder[RowsLayout]):
    """An `encoder_pool` Listener."""

    def __init__(
        self, ears: NanoEars, spec: AudioSpec, encoder_id: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(ears, spec, encoder_id, device, dtype)
        self._ears = ears

    def heard(self, items: list[EncoderInput]) -> list[str]:
        with torch.inference_mode():
            features = [mel.to(self.device, self.dtype) for mel in self._features(items)]
            return self._ears.spelled(features)


def ears_name(name: str) -> str | None:
    return "words.weight" if name == WORDS else thinker_audio_name(name, _MODULES)


def read_lexicon(folder: Path) -> Lexicon | None:
    """None where there is no list of words. Raises EngineError for files that hold anything else."""
    if not (folder / HEARD_WORDS).exists():
        return None
    words = _read_text(folder / HEARD_WORDS).split()
    if not words:
        raise checkpoint_error(f"{folder / HEARD_WORDS} holds no words")
    pairs = folder / HEARD_PAIRS
    return Lexicon(words, _read_pairs(pairs, frozenset(words)) if pairs.exists() else None)


def _read_pairs(path: Path, words: Set[str]) -> dict[str, dict[str, float]]:
    chances = {str(tenths): exp(-tenths / 10) for tenths in range(MAX_TENTHS + 1)}
    pairs: dict[str, dict[str, float]] = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        previous, *rest = line.split(" ")
        if not rest or len(rest) % 2 or not chances.keys() >= set(rest[1::2]):
            raise checkpoint_error(
                f"{path}, line {number}: not a word, then others, each with tenths up to {MAX_TENTHS}"
            )
        if not words >= set(rest[::2]):
            raise checkpoint_error(f"{path}, line {number}: a word that is not in {HEARD_WORDS}")
        pairs[previous] = {word: chances[tenths] for word, tenths in zip(rest[::2], rest[1::2], strict=True)}
        if sum(pairs[previous].values()) > 1:
            raise checkpoint_error(f"{path}, line {number}: chances of more than 1 together")
    return pairs


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        raise checkpoint_error(f"{path} is not of ASCII letters: {error}") from error


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
    lexicon = read_lexicon(folder)
    with torch.device("meta"):
        ears = NanoEars(config, attention, tokenizer, words.vocab_size, Speller(lexicon) if lexicon else None)
    spec = specs.audio or qwen2_5_omni_spec(read_feature_config(folder))  # none: deaf, and never asked
    model = load_audio_encoder("omnistage_nano", folder, ears, config, spec, ears_name, device, dtype)
    return ears, NanoEncoder(ears, spec, model.encoder_id, device, dtype)
