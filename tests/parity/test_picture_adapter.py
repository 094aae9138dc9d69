"""A picture adapter from the folder to the answer: what `transformers` says whose linears have it behind the
first picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_families.default_model.omni import make_omni
from tests.adapted_reference import FILE
from tests.default_reference import without_ears_and_voice
from tests.model_families.test_omnistage_nano import TEMPLATE, little_whisper, low_rank
from tests.served import Served, hf_messages, picture
from tests.tiny_models import reference_generate

torch.set_num_threads(1)
NEW_TOKENS = 10
WIDE = ("thinker.kv_memory=8MiB", "thinker.long_prefill_cap=2048")
CUT = ("thinker.kv_memory=8MiB", "thinker.long_prefill_cap=7", "thinker.max_step_visual_tokens=5")
TURNS = {
    "text": [("user", ["hello there"])],
    "a picture": [("user", [picture(1), "what is it?"])],
    "text first": [("user", ["hello"]), ("assistant", ["yes"]), ("user", ["see", picture(1), "then"])],
    "two": [("user", [picture(1), "and", picture(2)]), ("assistant", ["so"]), ("user", ["which?"])],
}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory) -> dict[bool, tuple[Path, Path]]:
    """With the adapter and without: ours, and the reference's."""
    base = tmp_path_factory.mktemp("adapter")
    seeing = tiny("qwen2_5_vl", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    seen, whisper = base / "seen", base / "whisper"
    for folder in (seen, whisper):
        folder.mkdir()
    for path in seeing.iterdir():
        (seen / path.name).write_bytes(path.read_bytes())
    (seen / "chat_template.jinja").write_text(TEMPLATE)
    little_whisper(whisper)
    text = json.loads((seen / "config.json").read_text())["text_config"]
    sizes = (text["num_hidden_layers"], text["hidden_size"], text["intermediate_size"])
    adapter = low_rank(*sizes, {"q_proj": 3, "v_proj": 2, "down_proj": 5})
    small = {name: value * 0.2 for name, value in adapter.items()}
    made = {}
    for adapted in (True, False):
        ours, theirs = base / f"ours {adapted}", base / f"theirs {adapted}"
        make_omni(
            seen, ours, whisper=whisper, adapter=small if adapted else None, one_position_per_token=True
        )
        theirs.mkdir()
        made[adapted] = (ours, without_ears_and_voice(ours, theirs))
        assert (theirs / FILE).exists() == adapted
    return made


@pytest.mark.parametrize("overrides", [WIDE, CUT], ids=["wide", "cut"])
def test_answers_are_the_references(folders, overrides) -> None:
    ours, theirs = folders[True]
    want = {name: reference_generate(theirs, *hf_messages(t), NEW_TOKENS) for name, t in TURNS.items()}
    plain = {
        name: reference_generate(folders[False][1], *hf_messages(t), NEW_TOKENS) for name, t in TURNS.items()
    }
    assert {name for name in TURNS if want[name] != plain[name]} == TURNS.keys() - {"text"}
    with Served(ours, *overrides) as served:
        found = served.ask_all(list(TURNS.values()), max_tokens=NEW_TOKENS, ignore_eos=True)
        again = [served.ask(turns, max_tokens=NEW_TOKENS, ignore_eos=True) for turns in TURNS.values()]
        served.assert_clean()
    for name, first, second in zip(TURNS, found, again, strict=True):
        count = len(want[name])
        assert first.tokens[:count] == second.tokens[:count] == want[name], name
    assert all(answer.num_cached_tokens for name, answer in zip(TURNS, again, strict=True) if name != "text")
