"""Against `transformers` generate: the same tokens and log-probabilities, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from model_families.registry import open_family
from tests.parity.preempting import Tight
from tests.served import Answer, Served, Shape, Turn, hf_messages, meeting, picture
from tests.tiny_models import FAMILIES, PADDED_VOCAB, VISION_FAMILIES, reference_inputs, reference_model

NEW_TOKENS = 12
NEVER = PADDED_VOCAB - 1  # a row of padding, never the likeliest (None would mean the model's own)

A, B, C, D = picture(1), picture(2, 112, 60), picture(3, 56, 140), picture(4)

TEXT: dict[str, Sequence[Turn]] = {
    "text": [("user", ["hello there, the answer is"])],
    "4 turns": [
        ("system", ["be brief"]),
        ("user", ["hello"]),
        ("assistant", ["hi"]),
        ("user", ["the rest is in the house\n\nand out"]),
        ("assistant", ["yes, and then?"]),
        ("user", ["again"]),
        ("assistant", ["ok"]),
        ("user", ["and in the end, who is it?"]),
    ],
}
IMAGES: dict[str, Sequence[Turn]] = {
    "1 image": [("user", [A, "what is it?"])],
    "3 images": [("user", ["first", A, "then", B, C, "compare them"])],
    "image in an earlier turn": [
        ("user", [B, "what is it?"]),
        ("assistant", ["a thing"]),
        ("user", ["and which colour is on the left?"]),
    ],
    "4 turns with images": [
        ("system", ["be brief"]),
        ("user", [A, "one"]),
        ("assistant", ["1"]),
        ("user", ["two", C]),
        ("assistant", ["2"]),
        ("user", ["three"]),
        ("assistant", ["3"]),
        ("user", [B, A, "four?"]),
    ],
}


def scenarios(family: str) -> dict[str, Sequence[Turn]]:
    return TEXT | IMAGES if family in VISION_FAMILIES else TEXT


@cache
def expected(
    folder: Path, family: str, name: str, new_tokens: int = NEW_TOKENS, ignore_eos: bool = False
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of the oracle, and its log-probabilities at each of their positions."""
    return oracle(folder, scenarios(family)[name], new_tokens, ignore_eos)


@torch.no_grad()
def oracle(
    folder: Path, turns: Sequence[Turn], new_tokens: int = NEW_TOKENS, ignore_eos: bool = False
) -> tuple[list[int], torch.Tensor]:
    inputs = reference_inputs(folder, *hf_messages(turns))
    model = reference_model(folder)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=NEVER if ignore_eos else model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    mask = torch.ones_like(inputs["input_ids"])
    out = model.generate(**inputs, attention_mask=mask, generation_config=config)
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, torch.log_softmax(torch.cat(out.logits).float(), -1)


def assert_same(answer: Answer, reference: tuple[list[int], torch.Tensor]) -> None:
    tokens, logprobs = reference
    assert answer.tokens == tokens
    assert len(answer.logprobs[0]) == len(tokens)
    for row, token, got in zip(logprobs, tokens, answer.logprobs[0], strict=True):
        assert abs(got.chosen - float(row[token])) < 1e-4
        for token_id, value in got.top:
            assert abs(value - float(row[token_id])) < 1e-4


WIDE = ("thinker.kv_memory=8MiB", "thinker.long_prefill_cap=2048")
CUT = ("thinker.kv_memory=8MiB", "thinker.long_prefill_cap=7", "thinker.max_step_visual_tokens=5")
PLAIN = (*WIDE, "thinker.overlap=false")


@pytest.mark.parametrize("settings", [WIDE, CUT, PLAIN], ids=["one chunk", "cut", "plain loop"])
@pytest.mark.parametrize("family", FAMILIES)
def test_alone(tiny: Callable[[str], Path], family: str, settings: tuple[str, ...]) -> None:
    """Each conversation alone, cold and then warm, in one chunk and in chunks that cut through images."""
    with Served(tiny(family), *settings) as served:
        for name, turns in scenarios(family).items():
            reference = expected(tiny(family), family, name)
            served.reset_cache()
            cold = served.ask(turns, max_tokens=NEW_TOKENS, logprobs=5)
            assert_same(cold, reference)
            assert cold.num_cached_tokens == 0
            warm = served.ask(turns, max_tokens=NEW_TOKENS, logprobs=5)
            assert_same(warm, reference)
            assert warm.num_cached_tokens is not None
            assert warm.num_cached_tokens >= (len(warm.prompt_token_ids) - 1) // 16 * 16
        served.assert_clean()


@pytest.mark.parametrize("settings", [WIDE, CUT], ids=["one chunk", "cut"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_at_once(tiny: Callable[[str], Path], family: str, settings: tuple[str, ...]) -> None:
    names = (list(scenarios(family)) * 4)[:8]
    with Served(tiny(family), *settings) as served:
        with meeting(len(names)):
            answers = served.ask_all([scenarios(family)[n] for n in names], max_tokens=NEW_TOKENS, logprobs=5)
        for name, answer in zip(names, answers, strict=True):
            assert_same(answer, expected(tiny(family), family, name))
        served.assert_clean()


TOGETHER = '[[worker]]\nname = "both"\nstages = ["vision", "thinker"]\n'


@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", "per-stage"), *((f, s) for f in ("qwen2_5_vl", "qwen3_vl") for s in ("per-stage", "file"))],
)
def test_stages_in_other_processes(
    tiny: Callable[[str], Path], tmp_path: Path, family: str, shape: Shape
) -> None:
    """Embeddings cross an edge, deepstack's beside them or not: alone, cold and warm, and at once."""
    file = tmp_path / "together.toml"
    file.write_text(TOGETHER)
    asked = scenarios(family)
    with Served(tiny(family), *CUT, workers=shape, deployment=file if shape == "file" else None) as served:
        assert {w.name for w in served.service.workers()} >= ({"both"} if shape == "file" else {"thinker"})
        for state in ("cold", "warm"):
            for name, turns in asked.items():
                answer = served.ask(turns, max_tokens=NEW_TOKENS, logprobs=5)
                assert_same(answer, expected(tiny(family), family, name))
                assert answer.num_cached_tokens or state == "cold"
        served.reset_cache()
        names = (list(asked) * 4)[:8]
        answers = served.ask_all([asked[name] for name in names], max_tokens=NEW_TOKENS, logprobs=5)
        for name, answer in zip(names, answers, strict=True):
            assert_same(answer, expected(tiny(family), family, name))
        served.assert_clean()
        assert {worker.restarts for worker in served.service.workers()} == {0}


UNCACHED = ("vision.embedding_cache=0", "vision.embedding_cache_host=0")


@pytest.mark.parametrize("loop", ["overlapped", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_midway(tiny: Callable[[str], Path], family: str, loop: str) -> None:
    """Each conversation in turn, its pictures taken from a cache again (in the overlapped loop) or encoded
    again."""
    folder, asked = tiny(family), scenarios(family)
    length = {n: reference_inputs(folder, *hf_messages(t))["input_ids"].shape[1] for n, t in asked.items()}
    tight = Tight(max(length.values()), 24)
    settings = tight.settings(open_family(folder).decoder_config.kv_bytes_per_token(torch.float32))
    if loop == "plain":
        settings += ("thinker.overlap=false", *(UNCACHED if family in VISION_FAMILIES else ()))
    with Served(folder, *settings) as served:
        for name, turns in asked.items():
            reference = expected(folder, family, name, tight.new_tokens, True)
            assert_same(tight.answer(served, turns, length[name], logprobs=5), reference)
        served.assert_clean()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_a_checkpoint_of_several_files(tiny: Callable[..., Path], family: str) -> None:
    folder = tiny(family, sharded=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    with Served(folder, *WIDE) as served:
        answer = served.ask(IMAGES["3 images"], max_tokens=NEW_TOKENS, logprobs=5)
        assert_same(answer, expected(tiny(family), family, "3 images"))
        served.assert_clean()


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_shared_first_image_with_a_different_second(tiny: Callable[[str], Path], family: str) -> None:
    folder = tiny(family)
    conversations = [[("user", [A, second, "which is it?"])] for second in (B, C, D, A)]
    with Served(folder, *WIDE) as served:
        for turns in conversations:
            assert_same(served.ask(turns, max_tokens=NEW_TOKENS, logprobs=5), oracle(folder, turns))
        served.reset_cache()
        with meeting(len(conversations)):
            answers = served.ask_all(conversations, max_tokens=NEW_TOKENS, logprobs=5)
        for turns, answer in zip(conversations, answers, strict=True):
            assert_same(answer, oracle(folder, turns))
        served.assert_clean()
