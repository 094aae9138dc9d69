"""Stage `decoder`: from codes to sound, at first by spectra alone, at last judged as well.

Shapes: B crops, S samples, T frames, Q groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.speaking.clock import Clip, Clock, learning_rate, set_rate
from training.speaking.corpus import Corpus, Utterance
from training.speaking.decoder import keep_snakes_positive, new_decoder, quicken, speak
from training.speaking.discriminators import Discriminators, fooled_loss, judge_loss, matching_loss
from training.speaking.phonetics import FRAME
from training.speaking.sizes import Sizes
from training.speaking.spectra import SpectralLoss
from training.speaking.weights import Average, load_parts, save_parts
from vocoder.code2wav import Code2WavNetwork

NAME = "decoder"
SPECTRAL, FOOLED, MATCHING = 15.0, 1.0, 2.0
RATE, JUDGE_RATE = 1e-3, 4e-4
SEED = 20260101


def open_decoder(folder: Path, sizes: Sizes, device: torch.device) -> Code2WavNetwork:
    """What was trained before, as far as its shapes are still those."""
    torch.manual_seed(SEED)
    decoder = new_decoder(sizes)
    own = decoder.state_dict()
    found = {
        name: value for name, value in load_parts(folder, NAME).items() if own[name].shape == value.shape
    }
    decoder.load_state_dict(own | found)
    return decoder.to(device)


class Crops:
    """Random stretches of all the speech there is, one behind the other on the device."""

    def __init__(self, corpus: Corpus, hours: float, device: torch.device) -> None:
        chosen: list[Utterance] = []
        left = int(hours * 3600 * 24_000)
        for utterance in corpus.utterances:
            if left <= 0:
                break
            chosen.append(utterance)
            left -= utterance.num_samples
        sound = np.concatenate([corpus.sound(one) for one in chosen]).reshape(-1, FRAME)
        codes = np.concatenate([corpus.codes(one) for one in chosen])
        assert len(sound) == len(codes)
        self._sound_TS = torch.from_numpy(sound).to(device)
        self._codes_TQ = torch.from_numpy(codes).to(device)

    def draw(self, batch: int, frames: int) -> tuple[Tensor, Tensor]:
        """Sound [B, S] and its codes [B, T, Q]."""
        device = self._sound_TS.device
        first_B = torch.randint(len(self._sound_TS) - frames, (batch,), device=device)
        at_BT = first_B[:, None] + torch.arange(frames, device=device)
        return self._sound_TS[at_BT].flatten(1).float() / 32768, self._codes_TQ[at_BT].long()


class Judgement:
    """The discriminators with their optimizer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._judges = Discriminators().to(device)
        parameters = list(self._judges.parameters())
        self._optimizer = torch.optim.AdamW(parameters, lr=JUDGE_RATE, betas=(0.8, 0.99))
        self._clip = Clip(parameters)

    def learn(self, true_BS: Tensor, made_BS: Tensor, rate: float) -> Tensor:
        set_rate(self._optimizer, rate)
        with torch.autocast(self._device.type, torch.bfloat16):
            verdict = judge_loss(self._judges(true_BS), self._judges(made_BS.detach()))
        self._clip.step(self._optimizer, verdict)
        return verdict

    def loss(self, true_BS: Tensor, made_BS: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            with torch.no_grad():
                true = self._judges(true_BS)
            made = self._judges(made_BS)
        return FOOLED * fooled_loss(made) + MATCHING * matching_loss(true, made)


def train_decoder(
    folder: Path,
    corpus: Corpus,
    sizes: Sizes,
    device: torch.device,
    clock: Clock,
    *,
    batch: int,
    hours: float,
    judged: float,
) -> None:
    """`judged`: the share of the time, at the end, that has discriminators."""
    decoder, crops = open_decoder(folder, sizes, device), Crops(corpus, hours, device)
    quicken(decoder)
    loss_of = SpectralLoss().to(device)
    average, clip = Average(decoder, 0.999), Clip(list(decoder.parameters()))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=RATE, betas=(0.8, 0.99), weight_decay=0.0)
    judgement: Judgement | None = None
    frames, going = sizes.window * 3 // 2, True
    while going:
        set_rate(optimizer, learning_rate(clock.fraction, RATE))
        sound_BS, codes_BTQ = crops.draw(batch, frames)
        made_BS = speak(decoder, decoder.embed(codes_BTQ))
        true_BS = sound_BS[:, : made_BS.shape[1]]
        figures: dict[str, Tensor | float] = {}
        spectral = loss_of(made_BS, true_BS)
        loss = SPECTRAL * spectral
        if clock.fraction > 1 - judged:
            judgement = judgement or Judgement(device)
            rate = learning_rate(clock.fraction, JUDGE_RATE)
            figures["judge"] = judgement.learn(true_BS, made_BS, rate)
            fooled = judgement.loss(true_BS, made_BS)
            figures["fooled"] = fooled
            loss = loss + fooled
        figures["norm"] = clip.step(optimizer, loss)
        keep_snakes_positive(decoder)
        average.follow()
        going = clock.tick({"spectral": spectral} | figures)
        if clock.time_to_save():
            save_parts(folder, NAME, average.state())
    average.apply()
    save_parts(folder, NAME, dict(decoder.state_dict()))
