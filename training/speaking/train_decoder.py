"""Stage `decoder`: from codes to sound, at first by spectra alone, at last judged as well.

Shapes: B crops, S samples, T frames, Q groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.speaking.clock import Clip, Clock, learning_rate, new_optimizer, set_rate
from training.speaking.corpus import Corpus, Utterance
from training.speaking.decoder import keep_snakes_positive, new_decoder, quicken, speak
from training.speaking.discriminators import Discriminators, fooled_loss, judge_loss, matching_loss
from training.speaking.phonetics import FRAME
from training.speaking.sizes import Sizes
from training.speaking.spectra import SpectralLoss
from training.speaking.stepping import Figures, Stepper
from training.speaking.weights import Average, load_parts, save_parts
from vocoder.code2wav import Code2WavNetwork

NAME, JUDGES = "decoder", "judges"
SPECTRAL, FOOLED, MATCHING = 15.0, 1.0, 2.0
RATE, JUDGE_RATE = 1e-3, 4e-4
JUDGED = 0.3  # the share of the time, at the end, that has discriminators, unless told
RATE_ON, JUDGED_ON = 4e-4, 0.9  # of a run that goes on from another
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
    """Random stretches of all the speech there is, one behind the other on the device. Where in a text they
    are is not part of their codes."""

    def __init__(self, corpus: Corpus, sizes: Sizes, hours: float, device: torch.device) -> None:
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
        codes[:, sizes.pointer] = 0
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

    def __init__(self, device: torch.device, trained: dict[str, Tensor]) -> None:
        """`trained`: what an earlier run's had come to; may be empty."""
        self._device = device
        self._judges = Discriminators()
        self._judges.load_state_dict(trained or self._judges.state_dict())
        self._judges.to(device)
        parameters = list(self._judges.parameters())
        self.optimizer = new_optimizer(parameters, betas=(0.8, 0.99), weight_decay=0.01)
        self._clip = Clip(parameters)

    def state(self) -> dict[str, Tensor]:
        return dict(self._judges.state_dict())

    def learn(self, true_BS: Tensor, made_BS: Tensor) -> Tensor:
        with self._half():
            verdict = judge_loss(self._judges(true_BS), self._judges(made_BS.detach()))
        self._clip.step(self.optimizer, verdict)
        return verdict

    def loss(self, true_BS: Tensor, made_BS: Tensor) -> Tensor:
        self._judges.requires_grad_(False)  # they learn nothing of this
        with self._half():
            with torch.no_grad():
                true = self._judges(true_BS)
            made = self._judges(made_BS)
        self._judges.requires_grad_(True)
        return FOOLED * fooled_loss(made) + MATCHING * matching_loss(true, made)

    def _half(self) -> torch.autocast:
        device = self._device.type
        return torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False)


class Learning:
    """The decoder with what teaches it; its two kinds of step, which may be recorded."""

    def __init__(
        self, decoder: Code2WavNetwork, device: torch.device, judges: dict[str, Tensor] | None = None
    ) -> None:
        self.decoder = decoder
        self._loss_of = SpectralLoss().to(device)
        self.optimizer = new_optimizer(list(decoder.parameters()), betas=(0.8, 0.99), weight_decay=0.0)
        self._clip = Clip(list(decoder.parameters()))
        self.judgement = Judgement(device, judges or {})

    def by_spectra(self, sound_BS: Tensor, codes_BTQ: Tensor) -> Figures:
        made_BS, true_BS = self._made(sound_BS, codes_BTQ)
        spectral = self._loss_of(made_BS, true_BS)
        return {"spectral": spectral.detach(), "norm": self._step(SPECTRAL * spectral)}

    def judged(self, sound_BS: Tensor, codes_BTQ: Tensor) -> Figures:
        made_BS, true_BS = self._made(sound_BS, codes_BTQ)
        spectral = self._loss_of(made_BS, true_BS)
        verdict = self.judgement.learn(true_BS, made_BS)
        fooled = self.judgement.loss(true_BS, made_BS)
        norm = self._step(SPECTRAL * spectral + fooled)
        figures = {"spectral": spectral, "judge": verdict, "fooled": fooled, "norm": norm}
        return {name: figure.detach() for name, figure in figures.items()}

    def _made(self, sound_BS: Tensor, codes_BTQ: Tensor) -> tuple[Tensor, Tensor]:
        made_BS = speak(self.decoder, self.decoder.embed(codes_BTQ))
        return made_BS, sound_BS[:, : made_BS.shape[1]]

    def _step(self, loss: Tensor) -> Tensor:
        norm = self._clip.step(self.optimizer, loss)
        keep_snakes_positive(self.decoder)
        return norm


def train_decoder(
    folder: Path,
    corpus: Corpus,
    sizes: Sizes,
    device: torch.device,
    clock: Clock,
    *,
    batch: int,
    hours: float,
    judged: float | None,
    recorded: bool,
) -> None:
    """`judged`: the share of the time, at the end, that has discriminators; None: by whether this goes on
    from another run. `recorded`: by CUDA graphs, where there is a GPU."""
    goes_on = bool(load_parts(folder, NAME))
    rate = RATE_ON if goes_on else RATE
    if judged is None:
        judged = JUDGED_ON if goes_on else JUDGED
    decoder, crops = open_decoder(folder, sizes, device), Crops(corpus, sizes, hours, device)
    quicken(decoder)
    learning = Learning(decoder, device, load_parts(folder, JUDGES))
    average = Average(decoder, 0.999)
    by_spectra = Stepper(learning.by_spectra, device, recorded=recorded)
    by_judges = Stepper(learning.judged, device, recorded=recorded)
    frames, going = sizes.window * 3 // 2, True
    while going:
        set_rate(learning.optimizer, learning_rate(clock.fraction, rate))
        set_rate(learning.judgement.optimizer, learning_rate(clock.fraction, JUDGE_RATE))
        stepper = by_judges if clock.fraction > 1 - judged else by_spectra
        figures = stepper(*crops.draw(batch, frames))
        average.follow()
        going = clock.tick(figures)
        if clock.time_to_save():
            save_parts(folder, NAME, without_pointer(average.state(), sizes))
            save_parts(folder, JUDGES, learning.judgement.state())
    average.apply()
    save_parts(folder, NAME, without_pointer(dict(decoder.state_dict()), sizes))
    save_parts(folder, JUDGES, learning.judgement.state())


def without_pointer(state: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """The same, but that every code of the pointer sounds as its first, the only one that training had."""
    codes = state["codes"].clone()
    pointer = codes.view(sizes.num_groups, sizes.codebook_size, -1)[sizes.pointer]
    pointer.copy_(pointer[:1].expand_as(pointer).clone())
    return state | {"codes": codes}
