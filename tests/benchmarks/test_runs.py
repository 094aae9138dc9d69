"""A run of many measurements: its parts, its processes and servers, and what it leaves however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.components import requirements, run_processes, run_servers
from benchmarks.components.requirements import missing
from benchmarks.components.run_processes import Run, finish, measured, save, spawn, try_part
from benchmarks.components.run_servers import CHAT_MODEL, Running, Server, servers, steps_of, steps_table

LOG = """\
omnistage: starting; the model is q3b
2026-01-02 03:04:05,678 INFO stages.start_progress: server: loading the program took 7.5 s
2026-01-02 03:04:05,678 INFO stages.start_progress: server: loading the program, 9 s so far
2026-01-02 03:04:05,678 INFO gpu-0: stage vision on cuda:0: loading weights (1,280 MiB)
2026-01-02 03:04:05,678 INFO gpu-0: stage vision on cuda:0: loading weights (1,280 MiB) took 1.5 s
2026-01-02 03:04:05,678 INFO cuda:0: stage thinker rank 1 on cuda:0: capturing decode graphs took 12.0 s
"""
READY = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
HANGS = """
import signal
def waits_for_nothing():
    print("begun", flush=True)
    signal.pause()
waits_for_nothing()
"""
DIES = "raise SystemExit(3)"
LIMIT_S = 20.0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    work = tmp_path / "work"
    work.mkdir()
    return Run("it", tmp_path, work, 100.0, {})


def test_a_part_that_fails_is_written_down_and_the_next_one_runs(run: Run) -> None:
    done: list[str] = []

    def fails() -> None:
        raise KeyError("latency")

    try_part(run, "one", fails)
    try_part(run, "other", lambda: done.append("other"))
    assert run.failures == ["one: KeyError: 'latency'"]
    assert done == ["other"]


def test_a_part_with_too_little_time_is_not_run(run: Run) -> None:
    try_part(run, "long", lambda: pytest.fail("it ran"), needs_s=101.0)
    assert [text.split(" (")[0] for text in run.not_run] == ["long"]
    assert not run.failures


def test_a_part_has_no_more_time_than_its_limit_and_than_is_left(run: Run) -> None:
    seen: list[float] = []

    def part() -> None:
        seen.append(run.left_s)
        try_part(run, "inner", lambda: seen.append(run.left_s), limit_s=1000.0)

    try_part(run, "outer", part, limit_s=50.0)
    assert all(49.0 < left_s <= 50.0 for left_s in seen)
    assert len(seen) == 2
    assert run.left_s > 90.0


def test_a_process_that_fails_or_is_late_is_told_with_its_last_lines(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = spawn(run, "failing", [sys.executable, "-c", "print('its reason'); raise SystemExit(2)"])
    assert not finish(run, {"failing": failing}, LIMIT_S)
    late = spawn(run, "late", [sys.executable, "-c", HANGS])
    assert not finish(run, {"late": late}, 0.0)
    assert late.poll() == -signal.SIGTERM
    assert run.failures == ["failing: status 2", "late: too late"]
    assert "its reason" in capsys.readouterr().out


def test_results_and_logs_are_left_however_it_ends(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def breaks() -> None:
        with measured("it", out, 9.0, {}, quick=True, table=lambda run: "a table") as run:
            works.append(run.work)
            run.results["found"] = 7
            run.log("one of them").write_text("a log")
            (run.work / "folder").mkdir()
            raise ZeroDivisionError

    works: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        breaks()
    assert not works[0].exists()
    assert json.loads((out / "it.json").read_bytes())["found"] == 7
    assert (out / "it.txt").read_text() == "a table\n"
    with tarfile.open(out / "it.logs.tar.gz") as logs:
        assert set(logs.getnames()) == {"one-of-them.log", "said.log"}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_long_log_loses_its_middle_when_it_is_packed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_processes, "MAX_PACKED_BYTES", 8)
    run.log("long").write_text("begin" + 1000 * "-" + "end")
    save(run)
    with tarfile.open(run.out / "it.logs.tar.gz") as logs:
        log = logs.extractfile("long.log")
        assert log is not None
        text = log.read().decode()
    assert text.startswith("begi\n[")
    assert text.endswith("]\n-end")


# --- servers ------------------------------------------------------------------------------------------------
@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are scripts, by their names."""

    def start(run: Run, server: Server, port: int) -> Running:
        code = {"good": READY, "dead": DIES, "slow": HANGS}[server.name]
        return Running(server, port, spawn(run, server.name, [sys.executable, "-c", code, str(port)]), 0.0)

    monkeypatch.setattr(run_servers, "start_server", start)
    monkeypatch.setattr(run_servers, "used_mib_of_gpus", list)


def test_a_server_that_dies_is_told_and_the_others_are_there(run: Run, scripts: None) -> None:
    started: list[Running] = []
    wanted = [Server(name, CHAT_MODEL, None) for name in ("good", "dead")]
    with servers(run, wanted, all_started=started) as there:
        assert list(there) == ["good"]
        assert started[0].process.poll() is None
        assert started[1].ended == 3
    assert all(one.process.poll() is not None for one in started)
    assert run.failures == ["dead: ended with status 3"]


def test_a_server_that_is_late_leaves_what_it_was_at(
    run: Run, scripts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(run: Run, started: list[Running], limit_s: float) -> None:
        end_s = time.monotonic() + LIMIT_S
        while "begun" not in run.log("slow").read_text():
            assert time.monotonic() < end_s

    monkeypatch.setattr(run_servers, "wait_ready", wait)
    with servers(run, [Server("slow", CHAT_MODEL, None)]) as there:
        assert not there
    assert run.failures == ["slow: not ready in time"]
    assert "waits_for_nothing" in run.log("slow").read_text()


def test_the_steps_of_a_start_are_read_from_its_log() -> None:
    assert steps_of(LOG) == [
        ("server", "loading the program", 7.5),
        ("stage vision on cuda:0", "loading weights (1,280 MiB)", 1.5),
        ("stage thinker rank 1 on cuda:0", "capturing decode graphs", 12.0),
    ]


def test_the_steps_of_two_starts_stand_side_by_side() -> None:
    rows = steps_table({"cold": LOG, "warm": LOG.splitlines()[1]}).splitlines()
    assert rows[1].split() == ["server:", "loading", "the", "program", "7.50", "7.50"]
    assert rows[3].split()[-2:] == ["12.00", "-"]


# --- what must be installed ---------------------------------------------------------------------------------
def test_nothing_is_missing_where_the_tests_run() -> None:
    assert requirements.complaint(gpu=False) == ""


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "required", lambda extras: ["msgspec>=0.20", "no-such-package>=2"])
    assert missing(requirements.required([])) == ["no-such-package>=2"]


def test_a_package_that_lacks_what_it_needs_is_named_with_it(tmp_path: Path) -> None:
    """Its wheel alone was installed, say."""
    (tmp_path / "half_there.py").write_text("import what_it_needs")
    described = tmp_path / "half_there-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: Half.There\nVersion: 1.0\n")
    (described / "top_level.txt").write_text("half_there\n")
    asked = "from benchmarks.components.requirements import missing; print(missing(['half-there>=1']))"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{run_processes.ROOT}"}
    done = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[\"half-there (No module named 'what_it_needs')\"]"


def test_pip_is_told_what_such_a_machine_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert requirements.main([]) == 0
    names = [requirements.name_of(line) for line in capsys.readouterr().out.splitlines()]
    assert {"fastapi", "soxr", "python-multipart"} <= set(names)
    assert not set(names) & {"torch", "transformers", "triton"}
