"""The leak check of conftest.py sees each kind of leak, and clean tests pass it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAKING = """
import os, subprocess, sys, threading
from pathlib import Path
from tests import conftest

conftest.GRACE_S = 0.05
release = threading.Event()
left = []

def test_clean():
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=release.wait, args=(0.01,))
    thread.start()
    thread.join()

def test_process():
    left.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_thread():
    threading.Thread(target=release.wait, args=(60,)).start()

def test_segment():
    left.append(Path(f"/dev/shm/omnistage-{os.getpid()}-leak"))
    left[-1].touch()

def test_of_others():
    left.append(Path(f"/dev/shm/omnistage-{os.getppid()}-theirs"))
    left[-1].touch()

def test_tidies_up():
    release.set()
    left[0].communicate()
    for path in left[1:]:
        path.unlink()
"""


def test_every_kind_of_leak_fails_its_test(tmp_path):
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    outcomes = {
        line.split("::")[1].split()[0]: line.split()[0] for line in run.stdout.splitlines() if "::" in line
    }
    leaking = {name for name, outcome in outcomes.items() if outcome == "ERROR"}
    assert leaking == {"test_process", "test_thread", "test_segment"}, run.stdout
    assert "child process" in run.stdout
    assert "thread 'Thread-" in run.stdout
    assert "shared-memory segment 'omnistage-" in run.stdout
    assert len(outcomes) == 6
