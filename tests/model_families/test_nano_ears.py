"""omnistage-nano's ears: what the language model reads where words were heard, and where none were."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from model_families.omnistage_nano.ears import LEAST_CHANCE, MOST_EMPTY, NO_WORDS, NanoEars
from model_families.omnistage_nano.letters import LETTERS, NUM_LETTERS
from model_families.omnistage_nano.lexicon import Lexicon, Speller
from model_families.qwen2_5_omni.audio_encoder import Qwen25OmniAudioConfig
from model_families.vision.attention import select_attention

SIZES = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
CHARACTERS = sorted({*LETTERS, *NO_WORDS})  # one token each, from 1 on


@pytest.fixture(scope="module")
def make():
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **{c: 1 + n for n, c in enumerate(CHARACTERS)}}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = msgspec.convert({**SIZES, "num_mel_bins": 80, "output_dim": 4}, Qwen25OmniAudioConfig)

    def made(speller=None):
        attention = select_attention(torch.device("cpu"), torch.float32, 8)
        ears = NanoEars(config, attention, tokenizer, 1 + len(CHARACTERS), speller)
        torch.nn.init.normal_(ears.words.weight)
        return ears

    return made


def read_back(ears, rows):
    """Characters of the rows of a sound; "_" is an empty one."""
    same = (rows[:, None] == ears.words.weight[None]).all(-1)
    return "".join(CHARACTERS[row.nonzero()[0, 0] - 1] if row.any() else "_" for row in same)


def chances(*likeliest):
    """Of rows in each of which one letter has this chance, and no letter the rest."""
    rows = torch.full((len(likeliest), NUM_LETTERS), 1e-9)
    for row, (letter, chance) in zip(rows, likeliest, strict=True):
        row[1 + LETTERS.index(letter)] += chance
        row[0] += 1 - chance
    return rows.log()


@pytest.mark.parametrize("speller", [None, Speller(Lexicon(["it", "is"]))])
def test_where_no_letter_is_likely_no_word_is_heard(make, speller):
    ears = make(speller)
    unsure = chances(("i", LEAST_CHANCE - 0.01), (" ", 0.9), ("t", 0.2), (".", 0.99))
    assert ears._spell(unsure) == ""
    sure = chances(("i", 0.9), ("t", LEAST_CHANCE + 0.2), (".", 0.99))
    assert ears._spell(sure) == "it."


def test_what_was_heard_stands_at_the_end(make):
    ears = make()
    assert read_back(ears, ears._read("it is", 12)) == "_______it is"
    assert read_back(ears, ears._read("it is", 3)) == "it "


def test_words_are_said_again_where_the_rows_before_them_are_many(make):
    ears = make()
    most = 5 + MOST_EMPTY + 5
    assert read_back(ears, ears._read("it is", most)) == (most - 5) * "_" + "it is"
    assert read_back(ears, ears._read("it is", most + 8)) == (MOST_EMPTY + 1) * "_" + "it is it is it is"


def test_a_recording_without_words_says_so(make):
    ears = make()
    length = len(NO_WORDS)
    assert read_back(ears, ears._read("", length)) == NO_WORDS
    assert read_back(ears, ears._read("", 2 * length + 6)) == f"_____{NO_WORDS} {NO_WORDS}"
    assert read_back(ears, ears._read("", 4)) == NO_WORDS[:4]
