"""The run on one GPU: which parts go together, what its table says, where a server that fails is looked into,
and all of it with tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.components import one_gpu, one_gpu_speech
from benchmarks.components.counted import between, counted_lines, cpu_seconds, parse_counts
from benchmarks.components.one_gpu import grouped
from benchmarks.components.one_gpu_ablation import EVERYTHING, SWITCHES, groups_of
from benchmarks.components.one_gpu_parts import CHAT_CASES, servers_for
from benchmarks.components.one_gpu_speech import placements, planned_gib, server_of, speech
from benchmarks.components.one_gpu_table import GOALS, Goal, put, table_of
from benchmarks.components.run_loads import WORK_HEADER, speech_work
from benchmarks.components.run_processes import ROOT, Run
from benchmarks.components.run_servers import CHAT_MODEL, DEPLOYMENTS, SPEECH_MODEL, Running, Server
from tests.small_speaker import write_speaker

PLAN = """\
model     q3o (qwen3_omni_moe), context 32768 tokens
  stage    device  dtype     weights    cache     activations  graphs     edges     total      limit
  vision   cuda:0  bfloat16  1.00 GiB   2.00 GiB  512.0 MiB    0.0 MiB    64.0 MiB  3.50 GiB   5.00 GiB
  vocoder  cuda:0  float32   824.0 MiB  1.00 GiB  1.21 GiB     1.21 GiB   0.0 MiB   512.0 MiB  -
"""


def run_in(folder: Path, **fields: object) -> Run:
    work = folder / "work"
    work.mkdir()
    models = {CHAT_MODEL: folder / "vl", SPEECH_MODEL: folder / "omni"}
    return Run("one_gpu", folder, work, 100.0, models, **fields)


def test_parts_that_share_servers_go_together_where_they_follow_one_another() -> None:
    assert grouped(one_gpu.PARTS) == [
        ["speech"],
        ["tests", "decode", "chat"],
        ["start"],
        ["alone"],
        ["kernels"],
        ["links"],
    ]
    assert grouped(["tests", "speech", "chat", "tests"]) == [["tests"], ["speech"], ["chat", "tests"]]


def test_the_table_has_every_goal_of_the_parts_and_says_which_were_reached(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.results["parts"] = ["decode", "alone"]
    put(run, "bf16, 1 stream: TPOT, ms", 1.7)
    put(run, "bf16, 32 streams: tok/s", 7000.0)
    put(run, "alone, encoder: 8 pictures, ms", None, 77.0)
    put(run, "something else", 3.0)
    rows = table_of(run).splitlines()[1:]
    assert len(rows) == len(GOALS["decode"]) + len(GOALS["alone"]) + 1
    found = {row.split("  ")[0]: row.split()[-4:] for row in rows}
    assert found["bf16, 1 stream: TPOT, ms"] == ["1.70", "1.44", "1.80", "yes"]
    assert found["bf16, 32 streams: tok/s"] == ["7000", "11500", "8000", "NO"]
    assert found["alone, encoder: 8 pictures, ms"][-3:] == ["-", "77.00", "130.0"]
    assert found["something else"][-3:] == ["3.00", "-", "-"]


def test_a_goal_is_reached_from_its_own_side() -> None:
    assert [Goal(2.0).reached(value) for value in (1.9, 2.1, None)] == ["yes", "NO", ""]
    assert [Goal(2.0, more=True).reached(value) for value in (1.9, 2.1)] == ["NO", "yes"]
    assert Goal().reached(1.0) == ""


def test_every_chat_case_has_its_goals() -> None:
    names = [name for name in GOALS["chat"] if name.startswith("one-gpu.toml")]
    assert {name.split(": ")[0].removeprefix("one-gpu.toml, ") for name in names} == set(CHAT_CASES)


def test_what_is_planned_is_the_sum_of_the_totals() -> None:
    assert planned_gib(PLAN) == 4.0


def test_the_servers_are_of_deployments_that_there_are(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    wanted = [*servers_for(run, ["decode", "chat"]), server_of(run, "speech")]
    assert [server.name.split(",")[0] for server in wanted] == ["bf16", "fp8", "defaults", "speech"]
    assert all(s.deployment is None or (DEPLOYMENTS / s.deployment).is_file() for s in wanted)
    assert servers_for(run, []) == []


# --- a server that does not get ready -----------------------------------------------------------------------
class Servers:
    """Stands for `servers`: each is as `outcomes` says, in turn; None: ready."""

    def __init__(self, *outcomes: int | str | None) -> None:
        self.outcomes = list(outcomes)
        self.tried: list[Server] = []

    @contextmanager
    def __call__(
        self, run: Run, wanted: Sequence[Server], *, limit_s: float, all_started: list[Running] | None = None
    ) -> Iterator[dict[str, Running]]:
        (server,) = wanted
        self.tried.append(server)
        outcome = self.outcomes.pop(0)
        running = Running(server, 1, subprocess.Popen(["true"]), 0.0)
        running.process.wait()
        running.ready_s = 1.0 if outcome is None else None
        running.ended = outcome if isinstance(outcome, int) else None
        if all_started is not None:
            all_started.append(running)
        yield {server.name: running} if outcome is None else {}


@pytest.fixture
def looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[Server], list[str], Run]]:
    """The servers that were tried, and the names of those that were measured."""

    def look(*outcomes: int | str | None, answers: bool = True) -> tuple[list[Server], list[str], Run]:
        run, fake, measured = run_in(tmp_path), Servers(*outcomes), list[str]()
        monkeypatch.setattr(one_gpu_speech, "servers", fake)
        monkeypatch.setattr(one_gpu_speech, "is_ready", lambda port: answers)
        monkeypatch.setattr(
            one_gpu_speech, "measure", lambda run, running, cases: measured.append(running.server.name)
        )
        monkeypatch.setattr(
            one_gpu_speech, "begin_alone", lambda run: subprocess.Popen(["true"], start_new_session=True)
        )
        run.log("speech").write_text("the last line")
        speech(run)
        return fake.tried, measured, run

    return look


def test_a_server_that_speaks_is_measured_and_nothing_else_is_tried(looked_into) -> None:
    tried, measured, run = looked_into(None)
    assert [server.name for server in tried] == measured == ["speech"]
    assert not run.failures
    assert run.results["figures"]["speech: start to ready, s"]["value"] == 1.0


def test_one_that_dies_is_tried_again_launch_by_launch_then_without_the_talker_s_kernels(looked_into) -> None:
    tried, measured, _ = looked_into(-6, 1, None)
    assert [server.name for server in tried] == ["speech", "speech again", "speech, plain talker"]
    assert "CUDA_LAUNCH_BLOCKING" not in dict(tried[0].env)
    assert dict(tried[1].env)["CUDA_LAUNCH_BLOCKING"] == "1"
    assert dict(tried[1].env)["TRITON_CACHE_DIR"] == dict(tried[0].env)["TRITON_CACHE_DIR"]
    assert "talker.kernels=reference" in tried[2].sets
    assert measured == ["speech, plain talker"]


def test_one_that_is_only_late_is_tried_again_as_it_was(looked_into) -> None:
    tried, measured, _ = looked_into("late", None)
    assert [server.name for server in tried] == ["speech", "speech again"]
    assert "CUDA_LAUNCH_BLOCKING" not in dict(tried[1].env)
    assert measured == ["speech again"]


def test_one_that_breaks_while_it_is_measured_is_looked_into(looked_into) -> None:
    tried, _, run = looked_into(None, None, answers=False)
    assert dict(tried[1].env)["CUDA_LAUNCH_BLOCKING"] == "1"
    assert run.failures == ["speech: the server does not answer any more"]


def test_what_steps_held_and_took_is_told_of_a_spoken_case() -> None:
    counts = {"talker num steps": 4.0, "talker frames": 12.0, "vocoder vocoder steps": 2.0}
    counts |= {"vocoder vocoder rows": 6.0, "vocoder vocoder frames": 12.0, "vocoder vocoder packets": 6.0}
    seconds = {"talker busy": 0.02, "talker sending": 0.002, "vocoder vocoder busy": 0.01}
    report = {"options": {"concurrency": 3}, "server_s": seconds, "server_counts": counts}
    found = dict(zip(WORK_HEADER, speech_work(report), strict=True))
    assert found.pop("streams") == "3"
    assert (found.pop("thinker ms"), found.pop("edge ms")) == ("-", "-")
    assert list(map(float, found.values())) == [3, 5, 0.5, 3, 6, 5, 2]


def test_what_the_file_has_not_chosen_is_measured_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, measured = Servers(None, None), list[str]()
    monkeypatch.setattr(one_gpu_speech, "servers", fake)
    monkeypatch.setattr(
        one_gpu_speech, "measure", lambda run, running, cases: measured.append(running.server.name)
    )
    run = run_in(tmp_path)
    placements(run)
    assert [server.name for server in fake.tried] == measured
    assert not run.failures
    apart, precise = fake.tried
    assert apart.replace is not None
    file = DEPLOYMENTS / str(apart.deployment)
    workers = tomllib.loads(file.read_text().replace(*apart.replace))["worker"]
    assert [worker["stages"] for worker in workers][1:] == [["thinker"], ["talker", "vocoder"]]
    assert "vocoder.dtype=bfloat16" in precise.sets


def test_an_ablation_switches_off_one_thing_at_a_time() -> None:
    assert SWITCHES[EVERYTHING] == ()
    assert all(SWITCHES[name] for name in SWITCHES if name != EVERYTHING)
    assert list(groups_of(["a", "b", "c"], 2)) == [["a", "b"], ["c"]]


# --- the command --------------------------------------------------------------------------------------------
def test_what_is_missing_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_gpu, "complaint", lambda *, gpu: "missing: soxr>=0.5")
    assert one_gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "missing: soxr>=0.5\n"
    assert not (tmp_path / "out").exists()


def test_it_loads_without_what_may_be_missing() -> None:
    """So that it can say so."""
    names = "('torch', 'msgspec', 'httptools', 'packaging', 'numpy')"
    asked = f"import sys, benchmarks.components.one_gpu; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker("qwen3_omni_moe", tmp_path_factory.mktemp("speaker"))


def test_an_edge_is_measured_and_its_figures_are_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert one_gpu.main(["--quick", "--out", str(out), "--only", "links"]) == 0
    assert {file.name for file in out.iterdir()} == {"one_gpu.json", "one_gpu.txt", "one_gpu.logs.tar.gz"}
    assert "links, shm, 4 KiB: one way p50" in (out / "one_gpu.txt").read_text()
    with tarfile.open(out / "one_gpu.logs.tar.gz") as logs:
        assert {"said.log", "links-cpu-cpu.log", "links-cpu-cpu.json"} <= set(logs.getnames())


@pytest.mark.slow
def test_every_part_runs_with_tiny_models(tmp_path: Path, tiny, speaker: Path) -> None:
    out = tmp_path / "out"
    models = ["--chat-model", str(tiny("qwen2_5_vl")), "--speech-model", str(speaker)]
    assert one_gpu.main(["--quick", "--out", str(out), "--budget-s", "3000", *models]) == 0
    found = json.loads((out / "one_gpu.json").read_bytes())
    assert (found["failures"], found["not_run"]) == ([], [])
    begun = (
        "speech: start",
        "speech x2: RTF",
        "bf16, 2",
        "fp8, 2",
        "one-gpu.toml, 32",
        "defaults, one image",
    )
    begun += ("start, cold: first", "start, warm: first", "alone, decode", "alone, encoder", "alone, talker")
    for start in (*begun, "kernels, head", "links"):
        assert [n for n, one in found["figures"].items() if n.startswith(start) and one["value"]], start


@pytest.mark.slow
def test_every_ablation_runs_with_a_tiny_model(tmp_path: Path, tiny) -> None:
    out = tmp_path / "out"
    command = ["--quick", "--out", str(out), "--budget-s", "3000", "--only", "ablation"]
    assert one_gpu.main([*command, "--chat-model", str(tiny("qwen2_5_vl"))]) == 0
    found = json.loads((out / "one_gpu.json").read_bytes())["figures"]
    for name in (*SWITCHES, "decode x1, without CUDA graphs"):
        assert [one for figure, one in found.items() if figure.startswith(name) and one["value"]], name


@pytest.mark.slow
def test_a_server_that_cannot_start_leaves_its_logs_and_the_next_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["--quick", "--out", str(out), "--only", "speech,links", "--speech-model", str(tmp_path)]
    assert one_gpu.main(command) == 1
    found = json.loads((out / "one_gpu.json").read_bytes())
    for name in ("speech", "speech again", "speech, plain talker"):
        assert f"{name}: ended with status 1" in found["failures"]
    with tarfile.open(out / "one_gpu.logs.tar.gz") as logs:
        log = logs.extractfile("speech.log")
        assert log is not None
        assert "no config.json" in log.read().decode()
    assert "links, shm, 4 KiB: one way p50, µs" in found["figures"]


EXPOSITION = """\
# TYPE omnistage:stage_step_seconds histogram
omnistage:stage_step_seconds_bucket{model_name="m",stage="thinker",le="0.1"} 3
omnistage:stage_step_seconds_sum{model_name="m",stage="thinker"} %s
omnistage:stage_step_seconds_count{model_name="m",stage="thinker"} %s
vllm:request_success_total{finished_reason="stop",model_name="m"} 1
vllm:request_success_total{finished_reason="length",model_name="m"} 2
omnistage:arena_bytes{model_name="m",stage="preprocess"} 7
"""


def test_what_a_server_counts_of_a_case_is_what_has_grown() -> None:
    before, after = parse_counts(EXPOSITION % (1.5, 4)), parse_counts(EXPOSITION % (3.75, 13))
    assert before["request_success_total"] == 3.0
    found = between(before, after)
    assert found == {"stage_step_seconds_sum thinker": 2.25, "stage_step_seconds_count thinker": 9.0}
    assert counted_lines(found) == [
        "counted by the server, s: stage_step thinker 2.25",
        "counts: stage_step_seconds_count thinker 9",
    ]


SPIN = """\
import subprocess, sys, time
if len(sys.argv) > 1:
    subprocess.run([sys.executable, "-c", sys.argv[1]])
else:
    while time.process_time() < 0.3:
        pass
    print(flush=True)
    input()
"""


def test_processor_time_is_that_of_a_process_and_its_children() -> None:
    command = [sys.executable, "-c", SPIN, SPIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = cpu_seconds(process.pid)
        process.communicate(b"\n")
    assert len(found) == 2
    assert sum(found.values()) >= 0.25
    assert cpu_seconds(process.pid) == {}
