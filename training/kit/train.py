"""`train ROOT --seconds S --out OUT`: what a kit trains, side by side, each until its own time is over.

A stage that fails is begun again once, from what it had saved; the others do not notice. What they have
saved is copied to OUT every half minute and at the end. The exit code tells whether all went well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

from training.kit.layout import Layout, speaker
from training.kit.outcome import save_outcome
from training.kit.unpack import count_gpus

StageName = Literal["seeing", "decoder", "talker", "hearing"]
STAGES: tuple[StageName, ...] = ("seeing", "decoder", "talker", "hearing")
USUAL = STAGES[:3]
SAMPLE = "sample"  # speaks with what decoder and talker came to
AFTERWARDS_S = {"seeing": 40.0, "decoder": 32.0, "talker": 32.0, "hearing": 30.0, SAMPLE: 0.0}
TRIAL_TIMES = 4  # so much longer they are on a CPU
LEAST_S = 90.0
FREE_CORES = 12
SPOKEN_SHARE = 0.75  # of the time, beside training
ENDING_S = 5.0  # to copy the last of it
LOOKS_EVERY_S, SAVED_EVERY_S, TOLD_EVERY_S = 0.5, 30.0, 30.0
WORTH_ANOTHER_TRY_S = 60.0
HOURS_ON = 3.0  # of speech with sound before a decoder goes on learning
FIRST_SHARE = 128  # of the sentences, of speakers beside training


@dataclass(frozen=True)
class Division:
    """Who gets which GPUs ("0,1", "" for none) and how many cores."""

    devices: dict[str, str]
    loaders: int  # that draw pictures
    speakers: int
    listeners: int  # that speak what is heard, where hearing is trained


def divide(stages: Sequence[str], num_gpus: int, num_cores: int) -> Division:
    """Seeing has a GPU of its own as soon as there are two. One core a stage, some for speech, the rest for
    pictures; some are left to others where there are none to draw."""
    devices = {}
    others = [stage for stage in stages if stage != "seeing"]
    for stage in stages:
        if num_gpus < 2 or stage == "seeing":
            devices[stage] = "0" if num_gpus else ""
        else:
            devices[stage] = str(1 + others.index(stage) % (num_gpus - 1))
    speaks = bool({"decoder", "talker"} & set(stages))
    speakers = max(num_cores // 8, 1) if speaks else 0
    if speaks and not {"seeing", "hearing"} & set(stages):
        speakers = max(speakers, num_cores - len(stages) - FREE_CORES)
    listeners = max(num_cores // 3 if len(stages) > 1 else num_cores - 3, 1) if "hearing" in stages else 0
    left = num_cores - len(stages) - speakers - listeners
    return Division(devices, min(max(left, 1), 26) if "seeing" in stages else 0, speakers, listeners)


def free_share(spoken: Path) -> int:
    """Behind those that speakers beside an earlier training on this machine wrote, whose speech is kept."""
    return max([FIRST_SHARE - 1, *(int(path.stem) for path in spoken.glob("*.jsonl"))]) + 1


@dataclass
class Stage:
    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    tries: int = 0
    failed: bool = False
    plain: bool = False  # without what may not work there

    @property
    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return lines[-1][:300] if lines else ""


class Training:
    def __init__(
        self, kit: Layout, stages: Sequence[str], division: Division, end_s: float, out: Path, *, trial: bool
    ) -> None:
        self._kit, self._division, self._end_s, self._out, self._trial = kit, division, end_s, out, trial
        self.stages = [Stage(name, kit.logs / f"{name}.log") for name in stages]
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._saved_s = self._told_s = time.time()

    def run(self) -> bool:
        """Whether every stage did what it was to do."""
        self._kit.logs.mkdir(exist_ok=True)
        try:
            self._start_speakers()
            for stage in self.stages:
                self._start(stage)
            while self._running and time.time() < self._end_s - ENDING_S / 2:
                time.sleep(LOOKS_EVERY_S)
                self._look()
            for stage in self._running:
                self._tell(f"{stage.name} did not end in time")
                stage.failed = True
        finally:
            for process in [*self._helpers, *(stage.process for stage in self.stages)]:
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
            self._save()
        return not any(stage.failed for stage in self.stages)

    @property
    def _running(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.process is not None]

    # --- one stage ------------------------------------------------------------------------------------------
    def _start(self, stage: Stage) -> None:
        devices = self._division.devices["talker" if stage.name == SAMPLE else stage.name]
        stage.tries += 1
        with stage.log.open("a") as log:
            stage.process = subprocess.Popen(
                self._command(stage),
                env=self._kit.environment(devices),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self._tell(f"{stage.name} begins on GPU {devices or 'none'}")

    def _stops_s(self, name: str) -> float:
        """When it ends by its own clock."""
        return self._end_s - ENDING_S - AFTERWARDS_S[name] * (TRIAL_TIMES if self._trial else 1)

    def _command(self, stage: Stage) -> list[str]:
        name = stage.name
        kit, end_s = self._kit, self._stops_s(name)
        python = [sys.executable, "-m"]
        if name == "seeing":
            command = [*python, "training.seeing.train", str(kit.base), str(kit.seeing)]
            command += ["--fonts", str(kit.fonts), "--seconds", f"{end_s - time.time():.1f}"]
            command += ["--workers", str(self._division.loaders)]
            if (kit.seeing / "state.json").exists():
                command += ["--resume", str(kit.seeing)]
            trial = ["--batch", "2", "--evaluated", "1", "--report-s", "1", "--save-s", "2"]
            return command + (trial if self._trial else [])
        if name == "hearing":
            command = [*python, "training.hearing.train", str(kit.hearing), "--assets", str(kit.assets)]
            command += ["--corpus", str(kit.heard), "--seconds", f"{end_s - time.time():.1f}"]
            return [*command, "--workers", str(self._division.listeners)]
        command = self._speaking(name) + ["--plain"] * stage.plain
        return command + ([] if name == SAMPLE else ["--end", f"{end_s:.1f}"])

    def _speaking(self, stage: str) -> list[str]:
        kit = self._kit
        command = [sys.executable, "-m", "training.speaking.run", stage, str(kit.speaking)]
        command += ["--assets", str(kit.assets), "--corpus", str(kit.spoken)]
        if stage == "decoder" and any(kit.speaking.glob("decoder-*.safetensors")):
            command += ["--hours", str(HOURS_ON)]  # what is good already learns from more
        trial = ["--hours", "0.001", "--batch", "2", "--rows", "512"]
        if not any(kit.speaking.glob("talker-*.safetensors")):
            trial += ["--sizes", "tiny"]  # what is gone on from has a size
        return command + (trial if self._trial else [])

    def _start_speakers(self) -> None:
        """The decoder is content with what was spoken before it began."""
        states = sorted(self._kit.speaking.glob("talker-*.safetensors"))
        seed = crc32(states[0].read_bytes()) if states else 0  # a run that goes on hears other sentences
        seconds = SPOKEN_SHARE * (self._end_s - time.time())
        first = free_share(self._kit.spoken)
        for share in range(first, first + self._division.speakers):
            command = speaker(self._kit, share, seconds, codes_only=True, seed=seed)
            with (self._kit.logs / f"speaker-{share}.log").open("w") as log:
                environment = self._kit.environment("")
                self._helpers.append(
                    subprocess.Popen(["nice", "-n", "10", *command], env=environment, stdout=log, stderr=log)
                )

    # --- all of them ----------------------------------------------------------------------------------------
    def _look(self) -> None:
        for stage in self._running:
            assert stage.process is not None
            if (code := stage.process.poll()) is not None:
                stage.process = None
                self._ended(stage, code)
        self._sample_in_time()
        if time.time() - self._told_s > TOLD_EVERY_S:
            self._told_s = time.time()
            for stage in self._running:
                self._tell(f"{stage.name}: {stage.last_line}")
        if time.time() - self._saved_s > SAVED_EVERY_S:
            self._save()

    def _ended(self, stage: Stage, code: int) -> None:
        if code == 0:
            self._tell(f"{stage.name} has ended: {stage.last_line}")
            return
        lines = stage.log.read_text(errors="replace").splitlines()[-25:]
        self._tell("\n".join([f"{stage.name} FAILED with {code}:", *lines]))
        if stage.tries == 1 and self._stops_s(stage.name) - time.time() > WORTH_ANOTHER_TRY_S:
            stage.plain = True
            self._start(stage)
        else:
            stage.failed = True

    def _sample_in_time(self) -> None:
        """Once neither decoder nor talker is trained any longer, they speak held-out sentences. The decoder
        may be an earlier run's."""
        names = {stage.name for stage in self.stages}
        spoken = {"decoder", "talker"}
        decoded = "decoder" in names or any(self._kit.speaking.glob("decoder-*.safetensors"))
        able = "talker" in names and decoded
        if able and SAMPLE not in names and not spoken & {stage.name for stage in self._running}:
            self.stages.append(Stage(SAMPLE, self._kit.logs / f"{SAMPLE}.log"))
            self._start(self.stages[-1])

    def _save(self) -> None:
        self._saved_s = time.time()
        for left in save_outcome(self._kit, self._out):
            self._tell(f"no room to bring back {left}")

    def _tell(self, what: str) -> None:
        print(f"[{self._end_s - time.time():.0f} s left] {what}", flush=True)


def train(kit: Layout, *, stages: Sequence[str], seconds: float, out: Path, trial: bool) -> bool:
    """Raises SystemExit when the kit is not whole, or there is no time."""
    end_s = time.time() + seconds
    if seconds < LEAST_S:
        raise SystemExit(f"{seconds:.0f} s are too few to train anything")
    needed = [kit.site]
    if {"decoder", "talker"} & set(stages):
        needed.append(kit.assets / "table.safetensors")
    if "seeing" in stages:
        needed += [kit.base / "model.safetensors", kit.fonts]
    if "hearing" in stages:
        needed += [kit.assets / "encoder.safetensors", kit.libraries]
    if lacking := [str(path) for path in needed if not path.exists()]:
        raise SystemExit(f"the kit is not whole, {lacking} are not there: unpack every folder first")
    num_gpus, num_cores = count_gpus(kit), len(os.sched_getaffinity(0))
    division = divide(stages, num_gpus, num_cores)
    print(f"GPUs {num_gpus}, {num_cores} cores: {division}", flush=True)
    for folder in (kit.seeing, kit.speaking, kit.hearing, kit.spoken, kit.heard, kit.logs):
        folder.mkdir(exist_ok=True)
    return Training(kit, stages, division, end_s, out, trial=trial).run()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="from now until everything is over")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=USUAL)
    parser.add_argument("--trial", action="store_true", help="tiny sizes, to try it on a CPU")


def main(given: argparse.Namespace) -> None:
    kit = Layout(given.root.absolute())
    fine = train(kit, stages=given.stages, seconds=given.seconds, out=given.out.absolute(), trial=given.trial)
    sys.exit(0 if fine else 1)
