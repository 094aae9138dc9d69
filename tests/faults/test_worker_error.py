"""A stage that raises in a worker of its own: that is started again, and what it was computing goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import nothing_left_behind
from tests.faults.test_worker_death import QUESTIONS, SETTINGS, sampling_of
from tests.served import Answer, Served

# Read by the interpreter of the fork server alone, whose children are the workers. A stage raises in the step
# that finds a file of its name, which is then gone.
SITE = """
import os, sys
if "stages.fork_server" in sys.orig_argv:
    from stages.encoder_stage import EncoderStage
    from stages.lm_stage import LMStage

    def raising(step):
        async def once(self):
            try:
                os.unlink(os.path.join({folder!r}, self._name))
            except FileNotFoundError:
                return await step(self)
            raise RuntimeError("the device is lost")
        return once

    for kind in (EncoderStage, LMStage):
        kind.step = raising(kind.step)
"""


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """The server here serves several tests."""
    with nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("raising")


@pytest.fixture(scope="module")
def per_stage(tiny: Callable[[str], Path], folder: Path) -> Iterator[tuple[Served, list[Answer]]]:
    """And the undisturbed answers."""
    (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with Served(tiny("qwen2_5_vl"), *SETTINGS, workers="per-stage") as served:
            yield served, answers(served)


def answers(served: Served) -> list[Answer]:
    async def ask_all() -> list[Answer]:
        await served.service.reset_cache()
        asks: Sequence[Answer] = await asyncio.gather(
            *(served.answer(question, **sampling_of(i)) for i, question in enumerate(QUESTIONS))
        )
        return list(asks)

    return served.run(ask_all())


@pytest.mark.parametrize("stage", ["vision", "thinker"])
def test_an_error_of_a_stage_costs_no_request(
    per_stage: tuple[Served, list[Answer]], folder: Path, stage: str
) -> None:
    """REL-01."""
    served, undisturbed = per_stage
    (folder / stage).touch()
    disturbed = answers(served)
    assert not (folder / stage).exists(), "it raised"
    served.run(served.worker_restarted(stage, 1))
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert (one.token_ids, one.finish_reasons) == (other.token_ids, other.finish_reasons)
    served.assert_clean()
