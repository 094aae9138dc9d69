"""Frames by graphs equal those drawn plainly, on the GPU if there is one, else in Triton's interpreter.
Collected through ../test_triton.py."""

from __future__ import annotations

import threading

import torch

from lm_engine.layers.selection import select_kernels
from lm_engine.model import MoeConfig, RopeConfig
from lm_engine.passes import CapturedPasses
from lm_engine.talker.graphs import CapturedFrames, PromptModel
from tests.lm_engine.talker.tiny_talker import GREEDY, Client, TinyTalker, config_of, drawn

torch.set_num_threads(1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROPE = RopeConfig(theta=1e4, inv_freq=tuple(1e4 ** (-p / 8) for p in range(8)))
SPARSE = MoeConfig(
    num_experts=6, num_chosen=2, intermediate_size=16, normalise=True, shared_intermediate_size=24
)


def talker(**changes):
    return TinyTalker(
        device=DEVICE,
        make_kernels=lambda: select_kernels("triton", DEVICE, torch.float32),
        head_dim=16,
        num_layers=1,
        rope=ROPE,
        **changes,
    )


def record(run):
    """As a CUDA graph: what is recorded has run once, and a replay writes to the result's first place."""
    result = run().clone()
    return lambda: result.copy_(run()), result


def answers(*, graphs, moe=None, later=False):
    """Four speak at once: one prompt in two chunks, one that waits for its text, one the graphs do not
    take."""
    rows = 2 if later else 4
    config = config_of(overlap=True, block_size=16, num_blocks=40, max_sequences=rows, max_step_tokens=40)
    with Client(talker(moe=moe), config) as client:
        runner = client.runner
        assert (runner._graphs is not None) == (DEVICE.type == "cuda")
        runner._graphs = runner._passes = None
        if graphs:
            runner.rehearse()  # a penalty of nought, of rows that were never used, warns in the interpreter
            recorder = {} if DEVICE.type == "cuda" else {"record": record}
            runner._graphs = CapturedFrames(
                client.model, runner.kv, runner.table, runner._last_frame, runner._suppressed_V, **recorder
            )
            model, attention = PromptModel(client.model), client.model.attention
            runner._passes = CapturedPasses(
                model, attention, runner.kv, runner.table, max_tokens=16, **recorder
            )
            if later:
                assert runner.capture_between_steps()
            else:
                runner.rehearse()
        client.say("greedy", [3, 55, 9, 4], [11, 8, 30], sampling=GREEDY, max_frames=3)
        client.say("long", [(7 * j) % 60 for j in range(21)], [5, 6], sampling=drawn(3), max_frames=2)
        late = client.add("late", [2, 51], [7, 9], sampling=drawn(4, top_k=0, temperature=1.3), max_frames=3)
        client.say("next", [1, 2, 3], [4, 9], sampling=drawn(6), max_frames=2)
        client.run()
        client.see("late")
        client.think("late")
        client.say("biased", [8, 1], [3], sampling=drawn(5, logit_bias=((7, 2.0),)), max_frames=2)
        client.run()
        assert client.engine.is_idle()
        if later:
            assert sorted(runner._graphs._captured) == [2], "the others come later"
            runner._launcher.submit(runner._graphs.capture_next).result()
            assert sorted(runner._graphs._captured) == [1, 2]
            assert list(runner._passes._captured) == runner._passes.shapes
        elif graphs and DEVICE.type == "cpu":
            assert sorted(runner._graphs._captured) == [1, 2]
    assert late.done
    return {name: (answer.frames, answer.reason) for name, answer in client.answers.items()}


def test_graphs_draw_the_frames_that_are_drawn_plainly():
    """On a GPU without sparse layers: torch has no grouped product of float32 there."""
    moe = None if DEVICE.type == "cuda" else SPARSE
    found = answers(graphs=True, moe=moe)
    assert found == answers(graphs=False, moe=moe)
    assert len({tuple(frames) for frames, _ in found.values()}) == 5


def test_before_the_others_are_captured_the_largest_draws_the_same(monkeypatch):
    monkeypatch.setattr("lm_engine.backlog.FIRST_REST_S", threading.TIMEOUT_MAX)
    assert answers(graphs=True, later=True) == answers(graphs=False)
