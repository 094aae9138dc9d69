"""A talker of seeded random weights, and a client that plays the thinker and the listener to its engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import torch

from contracts.errors import BadRequest
from contracts.media import Prompt
from contracts.messages import Speak
from contracts.params import SamplingParams
from lm_engine.config import EngineConfig
from lm_engine.decoder import DecoderStack
from lm_engine.layers.reference import ReferenceKernels
from lm_engine.memory import allocate_kv
from lm_engine.talker.engine import TalkerEngine
from lm_engine.talker.model import TalkerConfig, TalkerPrompt, as_written
from lm_engine.talker.predictor import CodePredictor
from lm_engine.talker.runner import TalkerRunner
from lm_engine.transfer import to_device
from tests.lm_engine.random_decoder import RandomSource, tiny_config

HIDDEN, WIDTH = 24, 24
CODES, END, SILENT = 40, 38, 39
NUM_GROUPS = 4
TEXT_VOCAB, FIRST_MEDIA = 60, 50


class TinyTalker:
    """Text rows are embeddings; media rows the thinker's hidden states; voices 0 and 1."""

    def __init__(
        self, *, text_hidden=False, end_bias=0.0, device="cpu", make_kernels=ReferenceKernels, **changes
    ) -> None:
        source, kernels = RandomSource(device=device), make_kernels()
        decoder = tiny_config(vocab_size=CODES, max_position=256, **changes)
        self.config = TalkerConfig(
            decoder=decoder,
            num_code_groups=NUM_GROUPS,
            hidden_width=HIDDEN,
            text_hidden=text_hidden,
            text_vocab_size=TEXT_VOCAB,
            end_codes=(END,),
            suppressed_codes=(SILENT,),
            residual=SamplingParams(top_k=8, top_p=0.9),
        )
        self.dtype, self.device = source.dtype, source.device
        self.stack = DecoderStack(decoder, source, kernels)
        self.attention = kernels.attention
        self.text_table = source.take("text", (TEXT_VOCAB + 3, WIDTH))
        self.code_table = source.take("codes", (CODES, WIDTH))
        self.head = kernels.pack_linear(source.take("head", (CODES, HIDDEN)), float32_output=True)
        self.end_bias = torch.zeros(CODES, device=device)
        self.end_bias[END] = end_bias
        inner = tiny_config(vocab_size=30, **{**changes, "num_layers": 1, "moe": None})
        tables = [source.take(f"table.{g}", (30, HIDDEN)) for g in range(1, NUM_GROUPS)]
        heads = [
            kernels.pack_linear(source.take(f"head.{g}", (30, HIDDEN)), float32_output=True)
            for g in range(1, NUM_GROUPS)
        ]
        self.predictor = CodePredictor(DecoderStack(inner, source, make_kernels()), tables, heads)
        self.text_table_VW = None if text_hidden else self.text_table[:TEXT_VOCAB]
        self.fail_next = False
        self.poison = False
        self.max_batch = 0

    def lay_out(self, prompt, voice):
        if voice not in ("0", "1"):
            raise BadRequest(f"no voice {voice!r}", param="voice")
        ids = np.array(prompt.token_ids, dtype=np.int64)
        media = ids >= FIRST_MEDIA
        length = len(ids) + 2  # the voice, the first token of text
        return TalkerPrompt(
            token_ids=ids,
            is_media=media,
            hidden_positions=np.flatnonzero(media),
            voice=int(voice),
            codes=[SILENT] * length,
            positions_AP=np.arange(length, dtype=np.int64)[None],
            position_delta=0,
        )

    def speller(self):
        return as_written

    def reserve(self, max_sequences):
        self.predictor.reserve(max_sequences)

    def prompt_rows(self, prompt, hidden_NX, first_token, first_hidden_1X):
        rows = self.text_table[to_device(prompt.token_ids, self.device)]
        rows.index_copy_(0, to_device(np.flatnonzero(prompt.is_media), self.device), hidden_NX)
        first = self.text_rows(to_device(np.array([first_token]), self.device), first_hidden_1X)
        return torch.cat([rows, self.code_table[prompt.voice][None], first])

    def text_rows(self, token_ids_K, hidden_KX):
        rows = self.text_table[token_ids_K]
        return rows if hidden_KX is None else rows + hidden_KX

    def closing_rows(self):
        return self.text_table[TEXT_VOCAB : TEXT_VOCAB + 2]

    def frame_rows(self, codes_RQ):
        rows = self.code_table[codes_RQ[:, 0]]
        for group in range(1, NUM_GROUPS):
            rows = rows + self.predictor.embed(codes_RQ[:, group], group)
        return rows

    def forward(self, rows_TW, positions_AT, kv, attention, metadata):
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        self.max_batch = max(self.max_batch, metadata.sequence_lengths.shape[0])
        return self.stack.forward(rows_TW, positions_AT, kv, attention, metadata)

    def logits(self, hidden_SH):
        logits = self.head(hidden_SH) + self.end_bias
        if self.poison:
            self.poison = False
            logits[0] = torch.nan
        return logits

    def complete(self, hidden_SH, code_S, draw):
        return self.predictor.complete(hidden_SH, self.code_table[code_S], code_S, draw)


def config_of(**changes) -> EngineConfig:
    fields = {
        "num_blocks": 129,
        "context_length": 128,
        "eos_token_ids": (),
        "block_size": 4,
        "max_step_tokens": 24,
        "max_sequences": 8,
        "long_prefill_cap": 16,
        "overlap": False,
        "stage": "talker",
    }
    return EngineConfig(**(fields | changes))


GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.1)


def drawn(seed=1, **changes) -> SamplingParams:
    fields = {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.05, "seed": seed}
    return SamplingParams(**(fields | changes))


def hidden_of(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@dataclass
class Answer:
    message: Speak
    text: list[int]
    frames: list[tuple[int, ...]] = field(default_factory=list)
    reason: str | None = None
    error: object = None
    num_chunks: int = 0

    @property
    def done(self) -> bool:
        return self.reason is not None or self.error is not None


class Client:
    def __init__(self, model=None, config=None) -> None:
        self.model = model or TinyTalker()
        self.config = config or config_of()
        kv = allocate_kv(
            self.model.config.decoder,
            self.config.num_blocks,
            self.config.block_size,
            self.model.dtype,
            self.model.device,
        )
        self.runner = TalkerRunner(
            self.model, kv, max_sequences=self.config.max_sequences, max_length=self.config.context_length
        )
        self.engine = TalkerEngine(self.config, self.model, self.runner)
        self.answers: dict[str, Answer] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def add(self, name, prompt, text, *, sampling=GREEDY, voice="0", max_frames=12, granted=1000) -> Answer:
        message = Speak(
            request_id=name,
            prompt=Prompt(list(prompt)),
            voice=voice,
            sampling=sampling,
            max_frames=max_frames,
            granted_frames=granted,
        )
        self.engine.add(message)
        self.answers[name] = Answer(message, list(text))
        return self.answers[name]

    def think(self, name, count=None, *, start=0, last=True) -> None:
        """Hands over the answer's tokens from `start`, `count` of them."""
        text = self.answers[name].text
        part = text[start:] if count is None else text[start : start + count]
        tensors = {"token_ids": torch.tensor(part, dtype=torch.int64)}
        if self.model.config.text_hidden:
            tensors["hidden"] = hidden_of(99, 64)[start : start + len(part)]
        self.engine.text_ready(name, tensors, last)

    def see(self, name, *, last=True) -> None:
        """Hands over the prompt's hidden states."""
        ids = self.answers[name].message.prompt.token_ids
        positions = [i for i, token in enumerate(ids) if token >= FIRST_MEDIA]
        self.show(name, positions, hidden_of(5, 64)[positions], last=last)

    def show(self, name, positions, hidden, *, last=True) -> None:
        tensors = {"positions": torch.tensor(positions, dtype=torch.int64), "hidden": hidden}
        self.engine.prompt_ready(name, tensors, last)

    def say(self, name, prompt, text, **fields) -> Answer:
        """Everything at once."""
        answer = self.add(name, prompt, text, **fields)
        self.see(name)
        self.think(name)
        return answer

    async def step(self) -> None:
        events = await self.engine.step()
        for chunk in events.chunks:
            answer = self.answers[chunk.request_id]
            assert answer.reason is None, "a frame after the end"
            assert (chunk.stream, chunk.seq) == ("codes", answer.num_chunks)
            answer.num_chunks += 1
            answer.frames += map(tuple, chunk.tensors["codes"].tolist())
            answer.reason = chunk.meta.get("finish")
            assert chunk.last == (answer.reason is not None)
        for failed in events.messages:
            self.answers[failed.request_id].error = failed.error
        assert self.engine.check_integrity() is None, self.engine.check_integrity()

    async def drain(self, max_steps=500) -> None:
        """Until nothing can go on without something from outside."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            await self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def run(self) -> None:
        asyncio.run(self.drain())


def alone(prompt, text, *, model=None, **fields) -> Answer:
    with Client(model or TinyTalker()) as client:
        answer = client.say("alone", prompt, text, **fields)
        client.run()
        assert client.engine.is_idle()
    return answer
