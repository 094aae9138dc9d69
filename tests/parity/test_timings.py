"""Where the time of an answer goes: every stage and every edge says how long things waited and took in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.omni_oracle import Heard, sound
from tests.served import Served, Shape, picture
from tests.spoken import speak

SETTINGS = ("thinker.kv_memory=8MiB", "talker.kv_memory=8MiB", "preprocess.workers=1")
STAGES = ("vision", "audio", "thinker", "talker", "vocoder")
EDGES = ("vision->thinker", "audio->thinker", "thinker->talker", "talker->vocoder")


@pytest.mark.parametrize("shape", ["one", pytest.param("per-stage", marks=pytest.mark.slow)])
def test_waits_show_between_the_stages_and_in_them(tiny_omni: Callable[..., Path], shape: Shape) -> None:
    """SCH-14."""
    with Served(tiny_omni("qwen3_omni_moe"), *SETTINGS, workers=shape) as served:
        question = [("user", [picture(1), "what is it?", Heard(sound(2, 0.5))])]
        answer = served.run(speak(served, question, max_tokens=6, ignore_eos=True))
        assert answer.pcm
        served.assert_clean()  # asks every stage, so what it told before has come
        timings = {(t.place, t.name): t for t in served.service.timings()}
        stats = served.service.stats()
    for stage in STAGES:
        queued, steps = timings[stage, "stage_queue_seconds"], timings[stage, "stage_step_seconds"]
        assert sum(queued.counts) >= 1, stage
        assert sum(steps.counts) >= 1, stage
        assert steps.total_s > 0
    for edge in EDGES:
        num_chunks = stats[edge]["edge_chunks_total"]
        assert num_chunks >= 1
        assert stats[edge]["edge_bytes_total"] > 0
        delivered = timings[edge, "edge_delivery_seconds"]
        assert (sum(delivered.counts), delivered.total_s > 0) == (num_chunks, True), edge
        copied = timings[edge, "edge_copy_seconds"]
        assert sum(copied.counts) == (0 if shape == "one" else num_chunks), (
            "inside a process nothing is copied"
        )
        assert sum(timings[edge, "edge_credit_wait_seconds"].counts) == 0, "no edge was full"
    assert stats["thinker"]["num_admissions_total"] == 1
    assert stats["thinker"]["admission_wait_seconds_total"] > 0
    assert stats["vision"]["encoder_queue_seconds_total"] > 0
