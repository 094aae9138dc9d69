"""The command line: options, fast help, errors as one line, and a server that starts and stops."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp

from api import cli
from api.settings import ApiSettings, SettingsError
from contracts.version import VERSION
from stages.options import ServeOptions
from stages.service import Service
from tests.api.fakes import ScriptedService
from tests.api.serving import TIMEOUT_S, user

HEAVY = ("torch", "transformers", "numpy", "fastapi", "uvicorn", "httpx", "prometheus_client")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom api.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('loaded:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded: []" in done.stdout
    for command in ("serve", "plan", "bench", "chat"):
        assert command in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"omnistage {VERSION}\n"


def test_it_says_something_before_it_loads_anything(capsys: pytest.CaptureFixture[str]) -> None:
    """And a host that others can reach is warned of where no key is asked for."""
    arguments = ["serve", "/nowhere", "--host", "0.0.0.0", "--port", "0"]
    assert cli.main(arguments) == 1
    first, second, third, last = capsys.readouterr().err.splitlines()
    assert first == "omnistage: starting; the model is /nowhere"
    assert "0.0.0.0 is open to other machines" in second
    assert third.startswith("omnistage: listening on http://0.0.0.0:")
    assert "no config.json in /nowhere" in last
    assert cli.main([*arguments, "--api-key", "k"]) == 1
    assert "open to other" not in capsys.readouterr().err


def test_ray_that_is_not_installed_is_told_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_is_installed", lambda package: False)
    assert cli.main(["serve", "/nowhere", "--ray"]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first == "omnistage: starting; the model is /nowhere"
    assert last == "omnistage: --ray needs the package ray; install the extra: pip install -e '.[ray]'"


@pytest.mark.parametrize("hard", [600, 1 << 20])
def test_as_many_connections_can_be_open_as_requests(hard: int) -> None:
    """A shell's 1024 descriptors would be used up before the bound on requests could refuse one."""
    hard = min(hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    code = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "from api.cli import main\nmain(['serve', '/nowhere', '--port', '0'])\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"({min(hard, 1 << 16)}, {hard})\n"


def test_errors_of_the_system_are_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "/nowhere", "--port", str(port)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"omnistage: cannot listen on 127.0.0.1:{port}: address already in use"


def parse(*arguments: str) -> ServeOptions:
    return cli.options_of(cli._parser().parse_args(arguments))


def test_serve_options() -> None:
    assert parse("serve") == ServeOptions()
    assert parse(
        *("serve", "models/a", "--host", "::", "--port", "9", "--dtype", "float32", "--api-key", "k"),
        *("--served-model-name", "a", "b", "--deployment", "d.toml", "--kv-memory", "2GiB"),
        *("--set", "thinker.devices=cuda:1", "--set", "a.b=2", "--media-root", "m"),
        "--allow-private-addresses",
    ) == ServeOptions(
        model=Path("models/a"),
        host="::",
        port=9,
        dtype="float32",
        served_model_name=("a", "b"),
        deployment=Path("d.toml"),
        overrides=("thinker.devices=cuda:1", "a.b=2"),
        media_root=Path("m"),
        kv_memory="2GiB",
        allow_private_addresses=True,
        api_key="k",
    )


def test_plan_takes_the_model_options_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("plan", "m", "--set", "a.b=2") == ServeOptions(model=Path("m"), overrides=("a.b=2",))
    assert parse("plan", "--gpu-memory", "80GiB").assumed_gpu_memory == "80GiB"
    with pytest.raises(SystemExit):
        parse("plan", "m", "--port", "9")
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["foo", "a=1", ".b=2", "a.b.c=3", "a.=1"])
def test_a_setting_that_is_none_is_refused_at_once(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("plan", "--set", setting)
    assert "want NAME.field=value" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:99999", "tcp://[::1", "http://127.0.0.1:80", "127.0.0.1:80"]
)
def test_a_worker_is_told_what_to_connect_to(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["worker", "--connect", url, "--name", "lm", "--token", "t"]) == 1
    assert "want tcp://HOST:PORT" in capsys.readouterr().err


def test_bench_hands_over_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []

    class Benchmarks:
        @staticmethod
        def main(argv: Sequence[str]) -> int:
            seen.append(argv)
            return 7

    monkeypatch.setitem(sys.modules, "benchmarks.cli", Benchmarks)  # type: ignore[arg-type]
    assert cli.main(["bench", "chat", "--help"]) == 7
    assert seen == [["chat", "--help"]]


def test_taken_port_fails_before_the_model_loads() -> None:
    loaded = False

    @asynccontextmanager
    async def starting() -> AsyncIterator[Service]:
        nonlocal loaded
        loaded = True
        yield ScriptedService()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ServeOptions(port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            asyncio.run(cli.serve(starting(), options, ApiSettings()))
    assert not loaded


def test_serves_until_told_to_stop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from api import server

    opened: asyncio.Queue[server.ApiServer] = asyncio.Queue()
    open_ = server.ApiServer.open

    def remember(self: server.ApiServer, app: ASGIApp) -> None:
        open_(self, app)
        opened.put_nowait(self)

    monkeypatch.setattr(server.ApiServer, "open", remember)
    stopped: list[str] = []

    @asynccontextmanager
    async def starting() -> AsyncIterator[Service]:
        yield ScriptedService()
        stopped.append("service")

    async def run() -> None:
        serving = asyncio.create_task(cli.serve(starting(), ServeOptions(port=0), ApiSettings()))
        async with asyncio.timeout(5):
            opened_server = await opened.get()
            url = capsys.readouterr().out.split()[-1]
            async with httpx.AsyncClient() as http:
                response = await http.post(f"{url}/v1/chat/completions", json=user("hi"))
            assert response.status_code == 200
            opened_server.stop()
            await serving

    asyncio.run(run())
    assert stopped == ["service"]


SIGNALLED = """
import asyncio, sys
from contextlib import asynccontextmanager
from api import cli
from api.settings import ApiSettings
from stages.event_loops import loop_factory
from stages.options import ServeOptions
from tests.api.fakes import Script, ScriptedService

@asynccontextmanager
async def starting():
    try:
        if sys.argv[1] == "loading":
            print("loading", flush=True)
            await asyncio.Event().wait()
        yield ScriptedService(Script(hold_at_step=2))
    finally:
        await asyncio.sleep(0)
        print("stages stopped", flush=True)

with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(cli.serve(starting(), ServeOptions(port=0), ApiSettings(drain_timeout_s=1)))
print("clean end", flush=True)
"""


@pytest.mark.parametrize(("phase", "number"), [("loading", signal.SIGINT), ("serving", signal.SIGTERM)])
def test_signal_stops_the_stages(phase: str, number: signal.Signals) -> None:
    """uvicorn's own handling would end the process between the last answer and the end of the stages."""
    with subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("loading" if phase == "loading" else "omnistage serves")
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert out.startswith("stages stopped")
    if phase == "serving":
        assert out.endswith("clean end\n")
        assert process.returncode == 0


ENDLESS = """
import sys, threading
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

def forever(*args, **kwargs):
    print("loading", flush=True)
    threading.Event().wait()

class Endless(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self) if name == sys.argv[1] else None

    def exec_module(self, module):
        forever()

sys.meta_path.insert(0, Endless())
if sys.argv[1] == "make_plan":
    import stages.launch
    stages.launch.make_plan = forever
if sys.argv[1] == "connect":
    import stages.worker_agent
    stages.worker_agent.connect = forever
from api import cli
sys.exit(cli.main(sys.argv[2:]))
"""
SERVE = ("serve", "/nowhere", "--port", "0")
WORKER = ("worker", "--connect", "tcp://127.0.0.1:9", "--name", "lm", "--token", "t")


@pytest.mark.parametrize(
    ("command", "status", "endless", "number"),
    [
        *[(SERVE, 1, module, signal.SIGTERM) for module in ("api.settings", "api.server", "api.app")],
        *[(SERVE, 1, what, signal.SIGTERM) for what in ("stages.launch", "make_plan")],
        *[(SERVE, 1, module, signal.SIGINT) for module in ("api.server", "stages.launch")],
        *[(WORKER, 0, what, signal.SIGTERM) for what in ("stages.worker_agent", "connect")],
    ],
)
def test_a_signal_ends_what_imports_or_loads_for_ever(
    command: tuple[str, ...], status: int, endless: str, number: signal.Signals
) -> None:
    """In the main thread before there is a loop, on it, and in threads that nothing can stop."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, endless, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == status
    assert "Traceback" not in errors
    assert errors.endswith("omnistage: stopped while loading\n" if status else "")


HOLDS_ON = """
import asyncio, sys
from contextlib import asynccontextmanager
from api import cli, ending
from api.settings import ApiSettings
from stages.options import ServeOptions

ending.CLEANING_LIMIT_S = cli.CLEANING_LIMIT_S = 0.1 if sys.argv[1] == "limit" else 1e6

@asynccontextmanager
async def starting():
    try:
        print("loading", flush=True)
        await asyncio.Event().wait()
        yield
    finally:
        print("ending", flush=True)
        await asyncio.Event().wait()

asyncio.run(cli.serve(starting(), ServeOptions(port=0), ApiSettings()))
"""


@pytest.mark.parametrize("by", ["limit", "second signal"])
def test_stages_that_do_not_end_while_loading_are_not_waited_for(by: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_ON, by], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.terminate()
        assert process.stdout.readline() == "ending\n"
        if by == "second signal":
            process.terminate()
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert errors.endswith("omnistage: stopped while loading\n")


# --- settings -----------------------------------------------------------------------------------------------
def test_settings_from_the_environment() -> None:
    assert ApiSettings.from_environment({"PATH": "x", "OMNISTAGE_API_KEY": ""}) == ApiSettings()
    given = {
        "OMNISTAGE_API_KEY": "k",
        "OMNISTAGE_MAX_BODY_BYTES": "1000",
        "OMNISTAGE_MAX_PROMPTS": "2",
        "OMNISTAGE_MAX_SAMPLES": "3",
        "OMNISTAGE_REQUEST_TIMEOUT_S": "1.5",
        "OMNISTAGE_SEND_STALL_TIMEOUT_S": "4",
        "OMNISTAGE_DRAIN_TIMEOUT_S": "5",
        "OMNISTAGE_ACCESS_LOG": "1",
    }
    expected = ApiSettings(
        api_key="k",
        max_body_bytes=1000,
        max_prompts=2,
        max_samples=3,
        request_timeout_s=1.5,
        send_stall_timeout_s=4.0,
        drain_timeout_s=5.0,
        access_log=True,
    )
    assert ApiSettings.from_environment(given) == expected
    assert ApiSettings.from_environment(given, api_key="other").api_key == "other"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_BODY_BYTES", "1GB"),
        ("MAX_SAMPLES", "0"),
        ("DRAIN_TIMEOUT_S", "soon"),
        ("ACCESS_LOG", "maybe"),
        *[("REQUEST_TIMEOUT_S", text) for text in ("-1", "inf", "nan")],
    ],
)
def test_bad_settings_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"OMNISTAGE_{name}"):
        ApiSettings.from_environment({f"OMNISTAGE_{name}": value})
