"""Which words follow which is what the language model says in every context, each counted as it is likely."""

from __future__ import annotations

from math import exp

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

from model_families.omnistage_nano.ears import HEARD_PAIRS, HEARD_WORDS, read_lexicon
from model_families.omnistage_nano.lexicon import Lexicon
from training.hearing import pairs

WORDS = ("it", "the", "was", "zoo")
SAID = sorted({word for text in (*pairs.SENTENCES, *pairs.CONTEXTS) for word in text.split()})
TOKENS = (
    "[UNK]",
    "Ġit",
    "ĠIt",
    "Ġthe",
    "Ġwas",
    "Ġlater",
    "it",
    "Ġzoo",
    *(one for one in SAID if one != "it"),
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(4)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    return Qwen2ForCausalLM(config).eval()


def test_words_are_tokens_in_either_spelling(tokenizer):
    spelled = pairs.spelled_words(tokenizer, Lexicon(WORDS))
    assert spelled.words == WORDS
    assert spelled.tokens == ((1, 2), (3,), (4,), (7,))
    chances = torch.arange(2.0 * len(TOKENS)).view(2, -1)
    first = [3, 3, 4, 7]
    later = [one + len(TOKENS) * len(tokens) for one, tokens in zip(first, spelled.tokens, strict=True)]
    assert spelled.of_words(chances).tolist() == [first, later]


def test_a_word_counts_in_a_context_as_it_is_likely_there(tokenizer, model, monkeypatch):
    monkeypatch.setattr(pairs, "SELDOM", 0.0)
    monkeypatch.setattr(pairs, "ROWS", 2)
    spelled = pairs.spelled_words(tokenizer, Lexicon(WORDS))
    found = pairs.follower_chances(model, tokenizer, spelled, 3)
    assert found.shape == (4, len(WORDS))

    @torch.no_grad()
    def behind(text: str, *tokens: int) -> torch.Tensor:
        ids = [*tokenizer.encode(text).ids, *tokens]
        return model(input_ids=torch.tensor([ids])).logits[:, -1].softmax(-1)

    first = torch.cat([behind(text) for text in pairs.SENTENCES])
    torch.testing.assert_close(found[0], spelled.of_words(first).mean(0))
    for row, tokens in zip(found[1:], spelled.tokens, strict=False):
        ways = [(text, token) for text in pairs.CONTEXTS for token in tokens]
        weights = torch.stack(
            [behind(text)[0, token] / behind(text)[0, list(tokens)].sum().sqrt() for text, token in ways]
        )
        follow = torch.cat([spelled.of_words(behind(text, token)) for text, token in ways])
        torch.testing.assert_close(row, weights @ follow / weights.sum())


def test_a_line_lists_what_is_likelier_than_alone_and_the_ears_read_it(tmp_path):
    lexicon = Lexicon(WORDS)
    alone = exp(lexicon.whole("zoo"))

    def row(*chances: float) -> str:
        return pairs.row_of("it", torch.tensor(chances), WORDS, lexicon)

    line = row(0.0, 0.3, 0.69, 1.9 * alone)
    assert line == "it was 4"
    assert row(0.65, 0.0, 0.0, 0.01) == "it it 5"
    assert row(*[0.01] * 4) == "it"
    (tmp_path / HEARD_WORDS).write_text("\n".join(WORDS))
    (tmp_path / HEARD_PAIRS).write_text(f"{line}\n")
    read = read_lexicon(tmp_path)
    assert read is not None
    assert read.after("it").whole.keys() == {"was"}
    assert exp(read.after("it").others) == pytest.approx(1 - exp(-0.4) / 2)
