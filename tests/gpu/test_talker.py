"""The talker on a CUDA device: the CPU's frames, and a launch that never waits for the device."""

from __future__ import annotations

import pytest
import torch

from tests.lm_engine.talker.test_engine import requests
from tests.lm_engine.talker.tiny_talker import Client, TinyTalker, config_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def frames(device, text_hidden):
    with Client(TinyTalker(device=device, text_hidden=text_hidden), config_of(overlap=True)) as client:
        for name, request in enumerate(requests()):
            client.say(str(name), **request)
        client.run()
        assert client.engine.is_idle()
    return {name: (answer.frames, answer.reason) for name, answer in client.answers.items()}


@pytest.mark.parametrize("text_hidden", [False, True])
def test_the_devices_draw_the_same_frames(text_hidden):
    assert frames("cuda", text_hidden) == frames("cpu", text_hidden)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_device():
    model = TinyTalker(device="cuda")
    frames("cuda", False)  # what is allocated once is there
    with Client(model, config_of()) as client:
        for name, request in enumerate(requests()):
            client.say(str(name), **request)
        launcher = client.runner._launcher
        try:
            launcher.submit(torch.cuda.set_sync_debug_mode, "error").result()
            client.run()
        finally:
            launcher.submit(torch.cuda.set_sync_debug_mode, "default").result()
        assert all(answer.error is None for answer in client.answers.values())
