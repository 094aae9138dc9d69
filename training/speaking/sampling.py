"""A plain loop that speaks with the training's own modules: everything is computed anew for every frame.

Shapes: B sequences, L rows, Q groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from training.speaking.prompts import TTS_PAD, Line
from training.speaking.rows import Batch, Rows, input_rows
from training.speaking.table import TextTable
from training.speaking.talker import TalkerNet

TOP_K = 50


class Speaker:
    def __init__(self, net: TalkerNet, table: TextTable, seed: int = 0) -> None:
        self._net, self._table = net, table
        self._sizes = net.sizes
        self._device = table.rows_VX.device
        self._generator = torch.Generator(self._device).manual_seed(seed)

    @torch.inference_mode()
    def speak(self, lines: list[Line], *, temperature: float, max_frames: int) -> list[Tensor]:
        """The codes of each line, [T, Q], up to its end or `max_frames`."""
        none = torch.zeros(0, self._sizes.num_groups, dtype=torch.int64, device=self._device)
        frames = [none for _ in lines]
        going = list(range(len(lines)))
        for _ in range(max_frames):
            codes_BQ = self._next([lines[i] for i in going], [frames[i] for i in going], temperature)
            ended = (codes_BQ[:, 0] == self._sizes.control["eos"]).tolist()
            for index, codes_Q, end in zip(going, codes_BQ, ended, strict=True):
                if not end:
                    frames[index] = torch.cat([frames[index], codes_Q[None]])
            going = [index for index, end in zip(going, ended, strict=True) if not end]
            if not going:
                break
        return frames

    def _next(self, lines: list[Line], frames: list[Tensor], temperature: float) -> Tensor:
        batch = self._batch(lines, frames)
        hidden_BLH = self._net.model(input_rows(self._net, self._table.rows_VX, batch))
        lengths = [line.prompt + len(codes) - 1 for line, codes in zip(lines, frames, strict=True)]
        last_B = torch.tensor(lengths, device=self._device)
        return self._draw_frame(
            hidden_BLH[torch.arange(len(lines), device=self._device), last_B], temperature
        )

    def _batch(self, lines: list[Line], frames: list[Tensor]) -> Batch:
        parts, starts, at, first = [], [], 0, 0
        for line, codes_TQ in zip(lines, frames, strict=True):
            found = self._table.find(line.rows)
            parts.append(found)
            starts.append((at, len(found), line.prompt, first, len(codes_TQ)))
            at, first = at + len(found), first + len(codes_TQ)
        codes_TQ = torch.cat([*frames, frames[0].new_zeros(1, self._sizes.num_groups)])
        rows = torch.from_numpy(np.concatenate(parts)).to(self._device)
        length = max(prompt + frames for _, _, prompt, _, frames in starts)
        pad = self._table.place(TTS_PAD)
        return Rows(self._sizes, rows, codes_TQ, pad).batch(np.array(starts, np.int64), length)

    def _draw_frame(self, hidden_BH: Tensor, temperature: float) -> Tensor:
        net, sizes = self._net, self._sizes
        logits = net.first_logits(hidden_BH).float()
        logits[:, [code for name, code in sizes.control.items() if name != "eos"]] = -torch.inf
        codes = [self._draw(logits, temperature)]
        heard = [hidden_BH, net.embed_first(codes[0])]
        for group in range(1, sizes.num_groups):
            said = net.code_predictor.model(torch.stack([h.to(hidden_BH.dtype) for h in heard], dim=1))[:, -1]
            logits = net.code_predictor.lm_head[group - 1](said).float()
            codes.append(self._draw(logits, temperature))
            if group + 1 < sizes.num_groups:
                heard.append(net.code_predictor.embed(codes[-1], group))
        return torch.stack(codes, dim=1)

    def _draw(self, logits_BK: Tensor, temperature: float) -> Tensor:
        if temperature == 0:
            return logits_BK.argmax(-1)
        top, _ = logits_BK.topk(min(TOP_K, logits_BK.shape[-1]))
        logits_BK = logits_BK.masked_fill(logits_BK < top[:, -1:], -torch.inf)
        chances_BK = (logits_BK / temperature).softmax(-1)
        return torch.multinomial(chances_BK, 1, generator=self._generator)[:, 0]
