"""`transformers`' spoken answers over tiny omni checkpoints: what its thinker gave, what its talker drew."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from contracts.digests import ContentDigest
from contracts.media import MediaItem, MediaSpan, Prompt
from model_families.vision.positions import GridSpan, mrope_positions
from tests.tiny_omni import CODEC_EOS, CODEC_PAD, NAMES

GRID = (1, 4, 6)  # patches; six tokens after merging


@dataclass(frozen=True)
class Spoken:
    """`text` are the tokens that the reference speaks: all that its thinker drew but the last."""

    prompt: Prompt
    voice: str
    text: list[int]
    layers_LPX: torch.Tensor  # hidden states of the prompt: embeddings, then after each layer
    text_hidden_KX: torch.Tensor  # of the text, after the final norm
    frames: list[tuple[int, ...]]
    ended: bool
    pictures: list[torch.Tensor]  # embeddings of each, deepstack levels beside them


class StubProcessor:
    """Positions of text and pictures, which all omni families share."""

    def positions(self, prompt: Prompt):
        spans = [GridSpan(span.offset, (1, GRID[1] // 2, GRID[2] // 2)) for span in prompt.spans]
        return mrope_positions(len(prompt.token_ids), spans)


def prompt_of(turns: list[Any], tokenizer: Any, family: str, seed: int = 0) -> Prompt:
    """Turns are (role, text); `<image>` in a text is a picture."""
    start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    names = NAMES[family]
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in (names.vision_start, names.vision_end)]
    image = tokenizer.convert_tokens_to_ids(names.image)
    num_tokens = GRID[1] * GRID[2] // 4
    ids: list[int] = []
    items, spans = [], []
    for role, text in [*turns, ("assistant", None)]:
        ids += [start, *tokenizer.encode(role + "\n", add_special_tokens=False)]
        for i, part in enumerate((text or "").split("<image>")):
            if i:
                ids.append(marks[0])
                digest = ContentDigest(bytes([len(items), seed]) * 8)
                spans.append(MediaSpan(len(ids), num_tokens, len(items), digest))
                items.append(
                    MediaItem(
                        modality="image",
                        bytes_digest=digest,
                        pixel_digest=digest,
                        num_tokens=num_tokens,
                        grid_thw=GRID,
                        source_size=(8, 8),
                    )
                )
                ids += [image] * num_tokens + [marks[1]]
            ids += tokenizer.encode(part, add_special_tokens=False)
        if text is not None:
            ids += [end, *tokenizer.encode("\n", add_special_tokens=False)]
    return Prompt(ids, tuple(items), tuple(spans))


def speak(
    model: Any, prompt: Prompt, voice: str, *, max_tokens: int, max_frames: int, seed: int = 0
) -> Spoken:
    """The reference's whole pipeline, greedy, its vocoder left out.

    Qwen2.5-Omni's prompt is padded by one token: without padding `generate` drops the mask, and the talker,
    which asks for the mask (as of transformers 5.24), then leaves out its start codes and its positions.
    """
    kept: dict[str, Any] = {}
    two_five = hasattr(model, "token2wav")
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[0] * two_five + prompt.token_ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][:, :two_five] = 0
    if prompt.items:
        patch = model.config.thinker_config.vision_config
        width = patch.in_channels if hasattr(patch, "in_channels") else 3
        width *= patch.temporal_patch_size * patch.patch_size**2
        generator = torch.Generator().manual_seed(seed)
        rows = GRID[1] * GRID[2] * len(prompt.items)
        inputs["thinker_pixel_values"] = torch.randn(rows, width, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([GRID] * len(prompt.items))
    thinker, talker = model.thinker.generate, model.talker.generate

    def think(**arguments):
        kept["thought"] = thinker(**arguments)
        return kept["thought"]

    def talk(**arguments):
        kept["talked"] = talker(**arguments)
        return kept["talked"]

    model.thinker.generate, model.talker.generate = think, talk
    vocoder = model.token2wav if two_five else model.code2wav
    silent = lambda *_, **__: torch.zeros(1, 1, 8)  # noqa: E731
    replaced = "forward" if two_five else "chunked_decode"
    original = getattr(vocoder, replaced)
    setattr(vocoder, replaced, silent)
    hook = model.thinker.model.visual.register_forward_hook(
        lambda *given: kept.update(seen=_rows(given[2], two_five))
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of its own arguments
            model.generate(
                **inputs,
                speaker=voice,
                thinker_max_new_tokens=max_tokens,
                thinker_do_sample=False,
                talker_do_sample=False,
                talker_max_new_tokens=max_frames + (not two_five),
                **({"talker_eos_token_id": [CODEC_PAD, CODEC_EOS]} if two_five else {}),
            )
    finally:
        hook.remove()
        del model.thinker.generate, model.talker.generate
        setattr(vocoder, replaced, original)
    return _spoken(prompt, voice, kept, two_five, max_frames)


def _spoken(prompt: Prompt, voice: str, kept: dict[str, Any], two_five: bool, max_frames: int) -> Spoken:
    thought, talked = kept["thought"], kept["talked"]
    text = thought.sequences[0, two_five + len(prompt.token_ids) : -1].tolist()
    layers_LPX = torch.stack([layer[0, two_five:] for layer in thought.hidden_states[0]])
    rows = [step[-1][0] for step in thought.hidden_states[1:]]
    if two_five:
        codes = talked[0, 1 + len(prompt.token_ids) + 2 :].tolist()
        ended = codes[-1] in (CODEC_PAD, CODEC_EOS)
        frames = [(code,) for code in (codes[:-1] if ended else codes)]
    else:
        drawn = [hidden[-1] for hidden in talked.hidden_states if hidden[-1] is not None]
        frames = [tuple(frame[0].tolist()) for frame in drawn]
        ended = len(frames) < max_frames
    pictures = list(kept["seen"].chunk(len(prompt.items))) if prompt.items else []
    return Spoken(prompt, voice, text, layers_LPX, torch.cat(rows), frames, ended, pictures)


def _rows(seen: Any, two_five: bool) -> torch.Tensor:
    levels = [] if two_five else seen.deepstack_features
    return torch.cat([seen.pooler_output, *levels], dim=1)
