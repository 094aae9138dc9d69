"""A kit arrives whole or says what is wrong; its stages do not stop one another; what they save returns."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest

from training.kit import outcome, train
from training.kit.layout import Layout
from training.kit.outcome import REST, save_outcome, take_outcome
from training.kit.pack import calls
from training.kit.pieces import Damaged, divide, take_folder, write_folders
from training.kit.train import Division, Stage, Training
from training.kit.train import divide as divide_machine

LIMIT = 4 << 20


@pytest.fixture
def packed(tmp_path):
    """A small file, an empty one, one that takes three folders."""
    source = tmp_path / "source"
    (source / "wheels").mkdir(parents=True)
    (source / "wheels" / "a.whl").write_bytes(b"wheel" * 1000)
    (source / "nothing").write_bytes(b"")
    large = np.random.default_rng(1).integers(0, 256, 9 << 20, dtype=np.uint8).tobytes()
    (source / "large").write_bytes(large)
    folders = write_folders(source, tmp_path / "out", ["wheels/a.whl", "nothing", "large"], LIMIT)
    return source, folders


def test_what_is_packed_arrives_whole_in_any_order(packed, tmp_path):
    source, folders = packed
    assert len(folders) == 3
    for folder in folders:
        sizes = [path.stat().st_size for path in folder.iterdir() if path.name != "kit.json"]
        assert sum(sizes) <= LIMIT
    root = tmp_path / "root"
    lacking = [take_folder(folder, root) for folder in reversed(folders)]
    assert lacking == [["wheels/a.whl", "nothing", "large"], ["wheels/a.whl", "nothing", "large"], []]
    for name in ("wheels/a.whl", "nothing", "large"):
        assert (root / name).read_bytes() == (source / name).read_bytes()


def test_a_piece_that_is_not_what_was_packed_is_refused(packed, tmp_path):
    _, folders = packed
    (folders[1] / "large.1").write_bytes(b"other")
    take_folder(folders[0], tmp_path / "root")
    with pytest.raises(Damaged, match="carry"):
        take_folder(folders[1], tmp_path / "root")


def test_a_file_is_cut_only_where_a_folder_ends():
    folders = divide({"a": 10, "b": LIMIT - 5, "c": 3 << 20}, LIMIT)
    assert [[(piece.path, piece.index, piece.size) for piece in folder] for folder in folders] == [
        [("a", 0, 10), ("b", 0, LIMIT - 10)],
        [("b", 1, 5), ("c", 0, 3 << 20)],
    ]


def test_the_last_call_trains(tmp_path):
    lines = calls([tmp_path / "1", tmp_path / "2"], "/tmp/kit", 500)
    assert ["train" in line.split() for line in lines] == [False, True]
    assert all(f"unpack {tmp_path / str(n)} " in line for n, line in enumerate(lines, 1))
    assert "--stages" not in lines[-1]
    assert calls([tmp_path / "1"], "/tmp/kit", 500, "seeing")[-1].endswith(" --stages seeing")


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        (0, {"seeing": "", "decoder": "", "talker": ""}),
        (1, {"seeing": "0", "decoder": "0", "talker": "0"}),
        (2, {"seeing": "0", "decoder": "1", "talker": "1"}),
        (4, {"seeing": "0", "decoder": "1", "talker": "2"}),
    ],
)
def test_seeing_has_a_gpu_of_its_own_as_soon_as_there_are_two(gpus, devices):
    division = divide_machine(("seeing", "decoder", "talker"), gpus, 16)
    assert division.devices == devices
    assert 3 + division.loaders + division.speakers <= 16


def test_hearing_alone_speaks_with_all_cores_but_a_few():
    assert divide_machine(("hearing",), 1, 16).listeners == 13
    assert divide_machine(("seeing", "hearing"), 1, 16).listeners == 5
    assert divide_machine(("hearing",), 0, 2).listeners == 1


@pytest.mark.parametrize(
    ("seen", "asked", "given"), [(None, "1", "1"), ("5,7", "1", "7"), ("5,7", "0,1", "5,7"), ("5", "", "")]
)
def test_a_stage_gets_its_gpu_among_those_that_are_seen(kit, monkeypatch, seen, asked, given):
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert kit.environment(asked)["CUDA_VISIBLE_DEVICES"] == given


def test_hearing_alone_needs_a_kit_of_its_own_things_alone(kit, tmp_path):
    with pytest.raises(SystemExit, match="encoder") as told:
        train.train(kit, stages=["hearing"], seconds=100.0, out=tmp_path, trial=True)
    assert "table" not in str(told.value)
    with pytest.raises(SystemExit, match="fonts"):
        train.train(kit, stages=["seeing", "hearing"], seconds=100.0, out=tmp_path, trial=True)


def test_cores_are_left_to_others_where_there_are_no_pictures():
    assert divide_machine(("talker",), 2, 32).speakers == 32 - 1 - train.FREE_CORES
    assert divide_machine(("talker",), 2, 32).devices == {"talker": "1"}
    assert divide_machine(("seeing", "talker"), 2, 32).speakers == 4


def test_speakers_of_a_later_training_write_over_nothing(tmp_path):
    assert train.free_share(tmp_path) == train.FIRST_SHARE
    for share in (3, train.FIRST_SHARE, train.FIRST_SHARE + 1):
        (tmp_path / f"{share}.jsonl").write_text("")
    assert train.free_share(tmp_path) == train.FIRST_SHARE + 2


def test_a_talker_alone_speaks_with_the_decoder_of_a_run_before(kit, tmp_path, quick):
    scripts = {"talker": "print('talked')", "sample": "print('spoken')"}
    assert [stage.name for stage in run_scripts(kit, tmp_path / "out", scripts)[0].stages] == ["talker"]
    (kit.speaking / "decoder-0.safetensors").write_bytes(b"d")
    training, fine = run_scripts(kit, tmp_path / "out", scripts)
    assert fine
    assert [stage.name for stage in training.stages] == ["talker", "sample"]


@pytest.fixture
def kit(tmp_path):
    layout = Layout(tmp_path / "kit")
    for folder in (layout.seeing, layout.speaking, layout.hearing, layout.logs):
        folder.mkdir(parents=True)
    return layout


def test_what_comes_back_is_within_the_limits_and_goes_where_it_was(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "MAX_BYTES", 3000)
    for name, size in (("trained-0", 900), ("trained-1", 800)):
        (kit.seeing / f"{name}.safetensors").write_bytes(b"s" * size)
    (kit.speaking / "talker-0.safetensors").write_bytes(b"t" * 700)
    (kit.speaking / "spoken.npz").write_bytes(b"n" * 5000)
    (kit.seeing / "state.json").write_text(json.dumps({"steps": 3}))
    (kit.logs / "seeing.log").write_text("step 3\n")
    out = tmp_path / "out"
    assert save_outcome(kit, out) == ["speaking.spoken.npz (0.0 MB)"]
    assert {path.name for path in out.iterdir()} == {
        *("seeing.trained-0.safetensors", "seeing.trained-1.safetensors"),
        *("speaking.talker-0.safetensors", REST),
    }
    back = tmp_path / "back"
    take_outcome(out, back)
    for path in ("seeing/trained-1.safetensors", "speaking/talker-0.safetensors", "seeing/state.json"):
        assert (back / path).read_bytes() == (kit.root / path).read_bytes()
    assert (back / "logs" / "seeing.log").read_text() == "step 3\n"


class Scripted(Training):
    """Its stages are a line of Python each."""

    scripts: dict[str, str]

    def _command(self, stage: Stage) -> list[str]:
        return [sys.executable, "-c", self.scripts[stage.name], *["--plain"] * stage.plain]

    def _start_speakers(self) -> None:
        pass


def run_scripts(kit, out, scripts, seconds=60.0):
    names = [name for name in scripts if name != "sample"]
    division = Division(dict.fromkeys(names, ""), 0, 0, 0)
    training = Scripted(kit, names, division, time.time() + seconds, out, trial=False)
    training.scripts = scripts
    return training, training.run()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(train, "LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(train, "WORTH_ANOTHER_TRY_S", -1e9)


def test_a_stage_that_fails_is_begun_again_plainly_and_stops_no_other(kit, tmp_path, quick):
    saved = kit.seeing / "trained-0.safetensors"
    scripts = {
        "seeing": f"open({str(saved)!r}, 'w').write('state')",
        "decoder": "import sys; sys.exit('--plain' not in sys.argv)",
        "talker": "print('talked')",
        "sample": "print('spoken')",
    }
    training, fine = run_scripts(kit, tmp_path / "out", scripts)
    assert fine
    assert {stage.name: stage.tries for stage in training.stages} == {
        **{"seeing": 1, "decoder": 2, "talker": 1, "sample": 1}
    }
    assert (tmp_path / "out" / "seeing.trained-0.safetensors").read_text() == "state"
    assert training.stages[-1].last_line == "spoken"


def test_what_others_saved_comes_back_when_one_fails_twice(kit, tmp_path, quick, capfd):
    saved = kit.speaking / "talker-0.safetensors"
    scripts = {"seeing": "raise ValueError('no pictures')", "talker": f"open({str(saved)!r}, 'w').write('x')"}
    training, fine = run_scripts(kit, tmp_path / "out", scripts)
    assert not fine
    assert [stage.failed for stage in training.stages] == [True, False]
    assert "no pictures" in capfd.readouterr().out
    assert (tmp_path / "out" / "speaking.talker-0.safetensors").exists()


def test_who_does_not_end_is_ended_and_what_there_is_comes_back(kit, tmp_path, quick):
    saved = kit.seeing / "trained-0.safetensors"
    script = f"open({str(saved)!r}, 'w').write('x'); import threading; threading.Event().wait()"
    training, fine = run_scripts(kit, tmp_path / "out", {"seeing": script}, seconds=train.ENDING_S)
    assert not fine
    assert training.stages[0].process.poll() is not None
    assert (tmp_path / "out" / REST).exists()


def test_a_kit_that_is_not_whole_is_not_trained(kit, tmp_path):
    with pytest.raises(SystemExit, match=r"base.*unpack every folder"):
        train.train(kit, stages=("seeing",), seconds=300.0, out=tmp_path, trial=True)
    with pytest.raises(SystemExit, match="too few"):
        train.train(kit, stages=("seeing",), seconds=-3.0, out=tmp_path, trial=True)
