"""The architecture's import table, and what no module of ours may hold, read from the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("preprocess", "encoder_pool", "lm_engine", "vocoder")
MAY_IMPORT = {
    "contracts": (),
    "connectors": ("contracts",),
    **dict.fromkeys(STAGES, ("contracts", "connectors")),
    "model_families": ("contracts", "connectors", *STAGES),
    "stages": ("contracts", "connectors", *STAGES, "model_families"),
    # benchmarks: `omnistage bench` only hands over to it; vocoder: the containers of spoken answers
    "api": ("stages", "contracts", "benchmarks", "vocoder"),
    "benchmarks": ("contracts",),
    "training": ("contracts", "connectors", *STAGES, "model_families"),  # nothing imports it
}
# Beside the benchmarks over HTTP, which work against any server: those that time one of our packages alone.
MEASURES_A_PART = {
    "benchmarks/components/connectors.py": ("connectors", "stages"),
    "benchmarks/components/cpu_kernels.py": ("lm_engine",),
    "benchmarks/components/gpu_encoder.py": ("encoder_pool", "model_families"),
    "benchmarks/components/gpu_links.py": ("connectors", "stages"),
    "benchmarks/components/gpu_decode.py": ("lm_engine", "model_families"),
    "benchmarks/components/gpu_speech.py": ("lm_engine", "model_families", "vocoder"),
    "benchmarks/components/host_step.py": ("lm_engine",),
    "benchmarks/components/kernel_cases.py": ("lm_engine",),
    "benchmarks/components/kernel_variants.py": ("lm_engine", "model_families"),
    "benchmarks/components/mixed_variants.py": ("lm_engine",),
    "benchmarks/components/preprocessing.py": ("preprocess",),
    "benchmarks/components/restart.py": ("stages",),
    "benchmarks/components/vocoder.py": ("vocoder", "model_families"),
    "benchmarks/components/routing.py": ("stages",),
    "benchmarks/components/shape_folder.py": ("model_families",),
    "benchmarks/components/speech_host.py": ("connectors", "lm_engine", "stages", "vocoder"),
}
HEAVY = {"torch", "transformers", "tokenizers", "safetensors"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# Handlers that catch everything and do not raise again; each says here why the process may go on.
BROAD_HANDLERS = {
    "api/sse.py": "the response has begun: the error becomes its last event",
    "stages/shell.py": "the stage is lost: the front process hears of it",
}


@dataclass(frozen=True)
class Module:
    path: Path  # relative to the root
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.parts[0]

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> tuple[Module, ...]:
    paths = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(Module(path.relative_to(ROOT), ast.parse(path.read_text())) for path in paths)


def imported(nodes) -> list[str]:
    """Dotted names that import statements among the nodes ask for; relative imports are not ours to use."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their package"
            assert node.module is not None
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def executed_on_import(tree: ast.AST) -> list[ast.stmt]:
    """Statements that run when the module is imported: neither function bodies nor TYPE_CHECKING blocks."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.stmt):
            found.append(node)
        found += executed_on_import(node)
    return found


def offences(check) -> list[str]:
    return [f"{module.path}: {offence}" for module in modules() for offence in check(module)]


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(MAY_IMPORT)
    assert {module.package for module in modules()} == packages


def wrong_directions(module: Module) -> list[str]:
    measured = MEASURES_A_PART.get(module.path.as_posix(), ())
    allowed = {module.package, *MAY_IMPORT[module.package], *measured}
    asked = {name.partition(".")[0] for name in imported(ast.walk(module.tree))}
    return sorted(asked & (MAY_IMPORT.keys() | {"tests"}) - allowed)


def test_the_exceptions_are_still_needed():
    assert {path for path in (*MEASURES_A_PART, *BROAD_HANDLERS) if not (ROOT / path).exists()} == set()


def test_imports_point_one_way():
    assert offences(wrong_directions) == []


def test_no_module_imports_itself_through_others():
    by_name = {module.name: module for module in modules()}
    unfinished, finished = [], set()

    def visit(name: str) -> None:
        if name in finished:
            return
        assert name not in unfinished, f"a cycle: {' -> '.join([*unfinished, name])}"
        unfinished.append(name)
        for target in imported(executed_on_import(by_name[name].tree)):
            if target in by_name and target != name:
                visit(target)
        finished.add(unfinished.pop())

    for name in by_name:
        visit(name)


def heavy_imports(module: Module) -> list[str]:
    if module.package not in ("contracts", "preprocess"):
        return []
    asked = {name.partition(".")[0] for name in imported(executed_on_import(module.tree))}
    return sorted(asked & HEAVY)


def test_light_packages_name_no_torch():
    assert offences(heavy_imports) == []


@pytest.mark.parametrize("package", ["contracts", "preprocess"])
def test_light_packages_load_no_torch(package):
    names = [m.name for m in modules() if m.package == package and not m.name.endswith("__main__")]
    code = f"import sys, {', '.join(names)}\nprint(sorted({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def has_true(call: ast.Call, name: str) -> bool:
    return any(word.arg == name and ast.unparse(word.value) == "True" for word in call.keywords)


def pickles(module: Module) -> list[str]:
    asked = {name.partition(".")[0] for name in imported(ast.walk(module.tree))}
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and (
            (ast.unparse(node.func) == "torch.load" and not has_true(node, "weights_only"))
            or ast.unparse(node.func) == "torch.save"
            or any(
                word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords
            )
        )
    }
    return sorted(asked & PICKLES | calls)


def test_nothing_pickles():
    assert offences(pickles) == []


def broad_handlers(module: Module) -> list[str]:
    if module.path.as_posix() in BROAD_HANDLERS:
        return []
    return [
        f"line {node.lineno} catches everything and goes on"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and _catches_all(node)
        and not isinstance(node.body[-1], ast.Raise)
    ]


def _catches_all(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def test_no_broad_handler_goes_on():
    assert offences(broad_handlers) == []


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (wrong_directions, "contracts/x.py", "def f():\n    from stages.service import Service"),
        (wrong_directions, "benchmarks/x.py", "import lm_engine.plan"),
        (wrong_directions, "api/x.py", "from tests.tiny_models import build_tiny"),
        (heavy_imports, "preprocess/x.py", "try:\n    import torch.nn\nfinally:\n    pass"),
        (heavy_imports, "contracts/x.py", "class A:\n    from transformers import AutoConfig"),
        (pickles, "stages/x.py", "import pickle"),
        (pickles, "stages/x.py", "x = torch.load(path)"),
        (pickles, "stages/x.py", "x = np.load(path, allow_pickle=True)"),
        (broad_handlers, "stages/x.py", "try:\n    f()\nexcept (OSError, Exception):\n    log()"),
        (broad_handlers, "stages/x.py", "try:\n    f()\nexcept:\n    raise_not = 1"),
    ],
)
def test_the_checks_see_offences(check, path, source):
    assert check(Module(Path(path), ast.parse(source)))


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (wrong_directions, "stages/x.py", "from model_families.text import ChatTokenizer"),
        (heavy_imports, "contracts/x.py", "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"),
        (broad_handlers, "stages/x.py", "try:\n    f()\nexcept BaseException:\n    clean_up()\n    raise"),
    ],
)
def test_the_checks_leave_the_rest_alone(check, path, source):
    assert not check(Module(Path(path), ast.parse(source)))
