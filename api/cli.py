"""The `omnistage` command. Heavy imports happen inside the subcommands, so that --help answers at once."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from api.ending import CLEANING_LIMIT_S, at_once, ended_by_signals, on_signals
from contracts.errors import OmnistageError
from contracts.version import VERSION

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from api.settings import ApiSettings
    from stages.options import ServeOptions
    from stages.service import Service
    from stages.start_progress import StartProgress

TOKEN_VARIABLE = "OMNISTAGE_WORKER_TOKEN"  # the same secret at the server and at its workers elsewhere
NUM_DESCRIPTORS = 1 << 16
STOPPED = "stopped while loading"
RAY_EXTRA = "install the extra: pip install -e '.[ray]'"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # its options are its own, `--help` included
        from benchmarks.cli import main as bench

        return bench(arguments[1:])
    parsed = _parser().parse_args(arguments)
    match parsed.command:
        case "serve":
            with ended_by_signals(STOPPED, status=1):
                return _serve(parsed)
        case "plan":
            return _plan(parsed)
        case "worker":
            with ended_by_signals("", status=0):
                return _worker(parsed)
        case _:
            return _chat(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnistage",
        description="Serves vision, audio and speech models as a graph of stages,"
        " behind an OpenAI-compatible API.",
    )
    parser.add_argument("--version", action="version", version=f"omnistage {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="load a model and serve it over HTTP")
    _add_model_options(serve)
    _add_server_options(serve)
    plan = commands.add_parser("plan", help="print stages, placement and memory without loading weights")
    _add_model_options(plan)
    plan.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="plan for another machine, whose GPUs have so much free (default: this machine's GPUs)",
    )
    _add_worker_options(
        commands.add_parser(
            "worker", help="run a worker of a server that is on another machine, until stopped"
        )
    )
    commands.add_parser("bench", help="run a benchmark against a running server", add_help=False)
    _add_chat_options(commands.add_parser("chat", help="talk to a running server in the terminal"))
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="checkpoint folder (default: the model `make setup` builds)")
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and activations (default: the checkpoint's)",
    )
    add("--deployment", type=Path, metavar="FILE", help="TOML file that places the stages")
    add(
        "--set",
        action="append",
        type=_override,
        default=[],
        metavar="PATH=VALUE",
        help="override one deployment value, such as thinker.replicas=2, limits.max_audio_s=600",
    )
    add(
        "--workers",
        choices=("file", "one", "per-stage"),
        default="file",
        help="processes of the stages: as the deployment's [[worker]] groups say, one for all, or one each",
    )
    add("--kv-memory", metavar="SIZE", help="memory of the KV cache, such as 2GiB")
    add("--media-root", type=Path, metavar="DIR", help="folder that file: URLs may read from (default: none)")
    add(
        "--allow-private-addresses",
        action="store_true",
        help="let media URLs point into private networks",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s: this machine only)")
    add("--port", type=_port, default=8000, help="default: %(default)s; 0: any free one")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names clients may use (default: the folder's)",
    )
    add("--api-key", metavar="KEY", help="clients must send it as a Bearer token (or OMNISTAGE_API_KEY)")
    add(
        "--ray",
        nargs="?",
        const="auto",
        metavar="HOST:PORT",
        help="place the workers in the Ray cluster of that head (default: the one this machine is in)",
    )


def _add_worker_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--connect", required=True, metavar="tcp://HOST:PORT", help="where the server waits; it logs it")
    add("--name", required=True, help="of the [[worker]] to be")
    add("--model", type=Path, help="checkpoint folder here (default: the server's path)")
    add(
        "--address",
        default="",
        metavar="IP",
        help="of this machine, when it has several and the wrong one is taken",
    )
    add("--token", metavar="SECRET", help="the server's (or OMNISTAGE_WORKER_TOKEN)")
    add(
        "--wait",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="for a server that does not answer yet, or not any more (default: %(default)g)",
    )


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    add("--model", help="model name (default: the served one)")
    add("--api-key", metavar="KEY", help="Bearer token (or OMNISTAGE_API_KEY)")
    add("--system", metavar="TEXT", help="system prompt")
    add("--image", action="append", default=[], type=Path, metavar="FILE", help="goes with the first message")
    add("--max-tokens", type=int, metavar="N", help="of one answer")
    add("--temperature", type=float, metavar="T", help="0: always the likeliest token")


def options_of(parsed: argparse.Namespace) -> ServeOptions:
    import os

    from stages.options import ServeOptions

    serving = parsed.command == "serve"
    return ServeOptions(
        model=parsed.model,
        host=parsed.host if serving else ServeOptions.host,
        port=parsed.port if serving else ServeOptions.port,
        dtype=parsed.dtype,
        served_model_name=tuple(parsed.served_model_name) if serving else (),
        deployment=parsed.deployment,
        overrides=tuple(parsed.set),
        media_root=parsed.media_root,
        kv_memory=parsed.kv_memory,
        workers=parsed.workers,
        allow_private_addresses=parsed.allow_private_addresses,
        api_key=parsed.api_key if serving else None,
        ray=parsed.ray if serving else None,
        worker_token=os.environ.get(TOKEN_VARIABLE) or None,
        assumed_gpu_memory=None if serving else parsed.gpu_memory,
    )


def _override(text: str) -> str:
    """Refused before anything heavy is imported; whether there is such a value only the model's stages
    tell."""
    path, equals, _ = text.partition("=")
    if not equals or path.count(".") != 1 or not all(path.strip().split(".")):
        raise argparse.ArgumentTypeError(f"{text!r}: want NAME.field=value, such as thinker.replicas=2")
    return text


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError(text)
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _say(message: str) -> None:
    """At once, also where the output is a pipe. What is printed as a result goes to stdout, and only that."""
    print(f"omnistage: {message}", file=sys.stderr, flush=True)


def _name(model: Path | None) -> str:
    return "the default model" if model is None else str(model)


def _fail(message: object) -> int:
    print(f"omnistage: {message}", file=sys.stderr)
    return 1


def _plan(parsed: argparse.Namespace) -> int:
    _say(f"planning {_name(parsed.model)}")
    from stages.launch import plan_text
    from stages.options import DeploymentError

    try:
        print(plan_text(options_of(parsed)))
    except (OmnistageError, DeploymentError) as error:
        return _fail(error)
    return 0


def _serve(parsed: argparse.Namespace) -> int:
    import logging
    import os

    _say(f"starting; the model is {_name(parsed.model)}")
    # Before torch loads: its idle OpenMP threads would spin on cores that the native kernels and the front
    # process need (6 ms of a core after every parallel operation).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from stages.options import SWITCH_INTERVAL_S, DeploymentError

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _allow_descriptors()

    from api.settings import ApiSettings, SettingsError
    from stages.event_loops import loop_factory
    from stages.start_progress import StartProgress

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = options_of(parsed)
    if options.ray is not None and not _is_installed("ray"):
        return _fail(f"--ray needs the package ray; {RAY_EXTRA}")
    try:
        settings = ApiSettings.from_environment(os.environ, api_key=options.api_key)
        if settings.api_key is None and not _is_loopback(options.host):
            _say(f"warning: {options.host} is open to other machines and no --api-key is set")
        progress = StartProgress()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                runner.run(serve(_launched(options, progress), options, settings, progress))
            except (asyncio.CancelledError, KeyboardInterrupt):
                at_once(STOPPED, status=1)  # closing the loop would wait for what is being imported
    except (OmnistageError, DeploymentError, SettingsError) as error:
        return _fail(error)
    except OSError as error:
        return _fail(error.strerror or error)
    return 0


def _allow_descriptors() -> None:
    """Each open request is a connection. As far as the system allows, and no further than `NUM_DESCRIPTORS`:
    some programs look at every one that there might be."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(NUM_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


@asynccontextmanager
async def _launched(options: ServeOptions, progress: StartProgress) -> AsyncIterator[Service]:
    from stages.options import expects_workers
    from stages.worker_processes import ForkServer

    def load() -> Callable[[ServeOptions, StartProgress, ForkServer], AbstractAsyncContextManager[Service]]:
        from stages.launch import serve_service

        return serve_service

    forks = ForkServer()
    try:
        if expects_workers(options):
            forks.start()  # its imports take as long as this process's, and need not wait for the plan
        with progress.step("server", "loading the program"):
            serve_service = await asyncio.to_thread(load)
        async with serve_service(options, progress, forks) as service:
            # What is there now stays. Looking through all of it takes a tenth of a second, in which no token
            # is sent.
            gc.collect()
            gc.freeze()
            yield service
    finally:
        forks.stop()


def _worker(parsed: argparse.Namespace) -> int:
    import logging
    import os
    from urllib.parse import urlsplit

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from stages.worker_agent import AgentOptions, run_agent

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    token = parsed.token or os.environ.get(TOKEN_VARIABLE)
    try:
        server = urlsplit(parsed.connect)
        host, port = server.hostname, server.port
    except ValueError:  # a port beyond 65535, half an address
        host, port = None, None
    if host is None or port is None or server.scheme != "tcp":
        return _fail(f"--connect {parsed.connect!r}: want tcp://HOST:PORT")
    if not token:
        return _fail(f"--token or {TOKEN_VARIABLE}: want the server's")
    options = AgentOptions(host, port, parsed.name, token, parsed.model, parsed.address, parsed.wait)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        on_signals(task.cancel)
        await run_agent(options)

    try:
        with asyncio.Runner() as runner:
            try:
                runner.run(run())
            except (asyncio.CancelledError, KeyboardInterrupt):
                at_once("", status=0)  # closing the loop would wait for a connection that is being made
    except OmnistageError as error:
        return _fail(error)
    return 0


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


async def serve(
    starting: AbstractAsyncContextManager[Service],
    options: ServeOptions,
    settings: ApiSettings,
    progress: StartProgress | None = None,
) -> None:
    """Listens, loads, serves until SIGINT or SIGTERM, then stops the stages; until it is ready every answer
    is
    a 503 that says what it is at. Raises OSError at once when the address is taken, CancelledError when a
    signal ends the loading."""
    from api.listener import listen

    loading = asyncio.current_task()
    assert loading is not None
    listener = listen(options.host, options.port)  # the rest of the program takes seconds to import
    from api.server import ApiServer
    from stages.start_progress import StartProgress

    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    _say(f"listening on {url}; until the model is ready every answer is a 503 that says what is being done")
    progress = progress or StartProgress()
    server = ApiServer(settings, progress)
    on_signals(lambda: server.stop() if server.is_open else _stop_loading(loading))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with AsyncExitStack() as stack:
            with progress.logged():
                create_app = await asyncio.to_thread(_import_app)
                service = await stack.enter_async_context(starting)
            server.open(create_app(service, settings))
            print(f"omnistage serves {service.card.names[0]} on {url}", flush=True)
            await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving
        listener.close()


def _import_app() -> Callable[[Service, ApiSettings], ASGIApp]:
    from api.app import create_app

    return create_app


def _stop_loading(loading: asyncio.Task[object]) -> None:
    """Stages that were started are told to end; what does not end by then is left to the kernel. A second
    signal does not wait."""
    if loading.cancelling():
        at_once(STOPPED, status=1)
    loading.cancel()
    asyncio.get_running_loop().call_later(CLEANING_LIMIT_S, at_once, STOPPED, 1)


def _chat(parsed: argparse.Namespace) -> int:
    import os

    from api.chat_cli import ChatOptions, run

    return run(
        ChatOptions(
            url=parsed.url,
            model=parsed.model,
            api_key=parsed.api_key or os.environ.get("OMNISTAGE_API_KEY"),
            system=parsed.system,
            images=tuple(parsed.image),
            max_tokens=parsed.max_tokens,
            temperature=parsed.temperature,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
