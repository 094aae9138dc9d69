"""`python -m training.hearing.pairs MODEL OUT`: which words the language model expects behind which.

MODEL: the default model's checkpoint, with the list of words that the ears know. The chance of a word behind
another is the mean over CONTEXTS, weighted by the square root of how likely the other word is in each (the
chance itself would leave little but one context: of "of" that of "I do not know of any"). Words are those
that are one token, in either spelling ("the", "The"). V tokens, W words, P previous words, B rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from model_families.default_model.shipped import PACKED, WEIGHTS, write_packed
from model_families.omnistage_nano.ears import HEARD_PAIRS, read_lexicon
from model_families.omnistage_nano.lexicon import Lexicon

LANGUAGE = "thinker.model."
SENTENCES = ("It rained all day.", "Where have you been?", "The door was open, and nobody was there.")
CONTEXTS = (  # one for every kind of word
    SENTENCES[0],
    "The man",
    "It was the end",
    "She had the best",
    "He said that they",
    "We saw",
    "He wanted to",
    "It was in",
    "There are",
    "This is a very",
    "People who",
    "I think you should",
    "Then she went",
    "with the",
    "A few of",
    "to go and",
    "How do",
)
PREVIOUS, FOLLOWERS = 2_400, 30  # words that have a row, the commonest; of a row at most
LEAST, LIKELIER = 1e-3, 2.0  # chance of a follower; times its chance alone
SELDOM = 0.08  # of a word's weights in all contexts: one of less is left out
ROWS = 256  # at a time


@dataclass(frozen=True)
class Spelled:
    """The words that are tokens, the commonest first, and those tokens."""

    words: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    def of_words(self, chances_BV: Tensor) -> Tensor:
        """[B, W]: of all tokens that are the word."""
        flat = torch.tensor([token for tokens in self.tokens for token in tokens])
        counts = torch.tensor([len(tokens) for tokens in self.tokens])
        word_of = torch.repeat_interleave(torch.arange(len(self.words)), counts)
        found = torch.zeros(len(chances_BV), len(self.words))
        return found.index_add_(1, word_of, chances_BV[:, flat])


def spelled_words(tokenizer: Tokenizer, lexicon: Lexicon) -> Spelled:
    tokens: dict[str, list[int]] = {}
    for written, token in tokenizer.get_vocab().items():
        word = written[1:].lower()
        if written.startswith("Ġ") and lexicon.whole(word) is not None:
            tokens.setdefault(word, []).append(token)
    words = sorted(tokens, key=lambda word: (-_chance(lexicon, word), word))
    return Spelled(tuple(words), tuple(tuple(sorted(tokens[word])) for word in words))


@torch.inference_mode()
def follower_chances(model: Qwen2ForCausalLM, tokenizer: Tokenizer, spelled: Spelled, count: int) -> Tensor:
    """[1 + P, W]: behind the beginning of a sentence, and behind each of the first `count` words."""
    sentences = [tokenizer.encode(text, add_special_tokens=False).ids for text in SENTENCES]
    contexts = [tokenizer.encode(text, add_special_tokens=False).ids for text in CONTEXTS]
    opened = [_next(model, torch.tensor([ids]), DynamicCache()) for ids in contexts]
    began = [_next(model, torch.tensor([ids]), DynamicCache()) for ids in sentences]
    first_W = spelled.of_words(torch.cat(began)).mean(0)
    previous = torch.tensor([number for number, ids in enumerate(spelled.tokens[:count]) for _ in ids])
    tokens = torch.tensor([token for ids in spelled.tokens[:count] for token in ids])
    weights = torch.cat(opened)[:, tokens]
    weights /= torch.zeros(len(contexts), count).index_add_(1, previous, weights).sqrt()[:, previous]
    weights /= torch.zeros(count).index_add_(0, previous, weights.sum(0))[previous]
    found_PW = torch.zeros(count, len(spelled.words))
    for ids, weight, text in zip(contexts, weights, CONTEXTS, strict=True):
        for rows in (weight >= SELDOM).nonzero()[:, 0].split(ROWS):
            cache = DynamicCache()
            _next(model, torch.tensor([ids]), cache)
            cache.batch_repeat_interleave(len(rows))
            chances_BW = spelled.of_words(_next(model, tokens[rows, None], cache))
            found_PW.index_add_(0, previous[rows], weight[rows, None] * chances_BW)
        print(f"{text!r}: {int((weight >= SELDOM).sum())} rows", flush=True)
    kept = torch.zeros(count).index_add_(0, previous, (weights * (weights >= SELDOM)).sum(0))
    return torch.cat([first_W[None], found_PW / kept[:, None]])


def _next(model: Qwen2ForCausalLM, ids: Tensor, cache: DynamicCache) -> Tensor:
    """[B, V]: the chances of the token behind each row, which goes into the cache."""
    logits: Tensor = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].softmax(-1)


def read_language_model(checkpoint: Path) -> Qwen2ForCausalLM:
    """float32: what of the checkpoint neither sees, hears nor speaks. Of text alone its three kinds of
    positions are one."""
    text = json.loads((checkpoint / "config.json").read_text())["thinker_config"]["text_config"]
    config = Qwen2Config(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_hidden_layers=text["num_hidden_layers"],
        num_attention_heads=text["num_attention_heads"],
        num_key_value_heads=text["num_key_value_heads"],
        rms_norm_eps=text["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]},
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    stored = load_file(checkpoint / "model.safetensors")
    kept = {name.removeprefix(LANGUAGE): one for name, one in stored.items() if name.startswith(LANGUAGE)}
    model.model.load_state_dict(kept)
    model.tie_weights()
    return model.eval()


def row_of(previous: str, chances_W: Tensor, words: Sequence[str], lexicon: Lexicon) -> str:
    """As `ears.HEARD_PAIRS` says; costs are rounded up, so that chances are never more than 1 together."""
    likely = [
        (ceil(-10 * log(chances_W[number])), words[number])
        for number in (chances_W >= LEAST).nonzero()[:, 0].tolist()
        if chances_W[number] >= LIKELIER * exp(_chance(lexicon, words[number]))
    ]
    return " ".join([previous, *(f"{word} {tenths}" for tenths, word in sorted(likely)[:FOLLOWERS])])


def _chance(lexicon: Lexicon, word: str) -> float:
    chance = lexicon.whole(word)
    assert chance is not None
    return chance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=WEIGHTS / (HEARD_PAIRS + PACKED))
    given = parser.parse_args()
    lexicon = read_lexicon(given.model)
    assert lexicon is not None, "the checkpoint has no list of words"
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    spelled = spelled_words(tokenizer, lexicon)
    rows = follower_chances(read_language_model(given.model), tokenizer, spelled, PREVIOUS)
    lines = [
        row_of(previous, chances, spelled.words, lexicon)
        for previous, chances in zip(("", *spelled.words[:PREVIOUS]), rows, strict=True)
    ]
    kept = [line for line in lines if " " in line]
    write_packed(given.out, kept)
    print(f"{given.out}: {len(kept)} words, {given.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
