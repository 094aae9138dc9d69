"""What one client sends must not reach another's request, nor cost the server more than a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.errors import ContextLengthExceeded
from tests.parity.test_matrix import A
from tests.served import Served


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tiny("qwen2_5_vl"), "thinker.kv_memory=8MiB") as served:

        def encode(*_: object, **__: object) -> list[int]:
            raise AssertionError("it was tokenised")

        monkeypatch.setattr(type(served.service.tokenizer), "encode_conversation", encode)
        with pytest.raises(ContextLengthExceeded, match="2000000 characters"):
            served.ask([("user", ["x" * 2_000_000])])
        monkeypatch.undo()
        assert len(served.ask([("user", [A, "hello"])], max_tokens=3).tokens) == 3
        served.assert_clean()


def test_health_tells_of_preprocessing_that_cannot_work(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tiny("qwen2_5_vl"), "thinker.kv_memory=8MiB") as served:
        assert served.service.ready()
        assert {s.stage: s.state for s in served.service.health()}["preprocess"] == "ready"
        monkeypatch.setattr(served.service.preprocessor.pool, "can_work", lambda: False)
        assert {s.stage: s.state for s in served.service.health()}["preprocess"] == "failed"
        assert not served.service.ready()
