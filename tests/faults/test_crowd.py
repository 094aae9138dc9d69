"""Many pictures at once through a narrow edge: all are answered or told to come back, none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from contracts.errors import TooManyRequests
from tests.served import Answer, Served, picture

NUM_REQUESTS, NUM_PICTURES, MAX_REQUESTS = 200, 40, 160
DEPLOYMENT = """
[[worker]]
name = "eyes"
stages = ["vision"]
[[worker]]
name = "mind"
stages = ["thinker"]
[[edge]]
source = "vision"
target = "thinker"
capacity = 2
"""
SETTINGS = (
    "thinker.kv_memory=8MiB",
    "preprocess.workers=1",
    "vision.embedding_cache=0",
    "vision.embedding_cache_host=0",
    f"server.max_requests={MAX_REQUESTS}",
)


def test_nobody_is_lost_between_the_encoder_and_the_language_model(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """REL-05, SCH-13."""
    file = tmp_path / "narrow.toml"
    file.write_text(DEPLOYMENT)
    with Served(tiny("qwen2_5_vl"), *SETTINGS, workers="file", deployment=file) as served:
        questions = [[("user", [picture(seed, 56, 56), "what?"])] for seed in range(NUM_PICTURES)]
        alone = [served.ask(question, max_tokens=2).tokens for question in questions]
        served.reset_cache()
        before = served.stats("vision")

        async def crowd() -> list[Answer | BaseException]:
            asks = [
                served.answer(questions[index % NUM_PICTURES], cache_salt=str(index), max_tokens=2)
                for index in range(NUM_REQUESTS)
            ]
            return await asyncio.gather(*asks, return_exceptions=True)

        outcomes = served.run(crowd())
        served.assert_clean()
        refusals = [outcome for outcome in outcomes if isinstance(outcome, TooManyRequests)]
        assert len(refusals) == NUM_REQUESTS - MAX_REQUESTS
        assert all(refusal.retry_after_s for refusal in refusals)
        for index, outcome in enumerate(outcomes):
            if outcome not in refusals:
                assert isinstance(outcome, Answer), repr(outcome)
                assert outcome.tokens == alone[index % NUM_PICTURES]
        told = {
            name: value - before[name] for name, value in served.stats("vision").items() if name in before
        }
        assert told["encoder_items_total"] >= MAX_REQUESTS, "with a salt each, nobody shares"
        assert told["encoder_items_total"] > 2 * told["encoder_batches_total"], "they are encoded together"
