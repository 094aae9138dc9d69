"""The default model as `transformers` knows it: without ears and voice, which are of a family of its own."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.adapted_reference import keep_beside

THINKER, EARS = "thinker.", "thinker.audio_tower."
READ_BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")
OF_EARS = ("audio_config", "audio_start_token_id", "audio_end_token_id", "audio_token_id", "hears")


def without_ears_and_voice(checkpoint: Path, out: Path) -> Path:
    """A Qwen2.5-VL folder of the checkpoint's own weights; itself where it is one."""
    config = json.loads((checkpoint / "config.json").read_text())
    if "thinker_config" not in config:
        return checkpoint
    thinker = {name: value for name, value in config["thinker_config"].items() if name not in OF_EARS}
    thinker |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    (out / "config.json").write_text(json.dumps(thinker))
    stored = load_file(checkpoint / "model.safetensors")
    tensors = {
        name.removeprefix(THINKER): value
        for name, value in stored.items()
        if name.startswith(THINKER) and not name.startswith(EARS)
    }
    keep_beside(out, tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in READ_BESIDE:
        (out / name).symlink_to((checkpoint / name).resolve())
    return out
