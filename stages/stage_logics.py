"""Stage logics and shells of a plan, for whichever process hosts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from connectors.interface import Receiver, Sender
from contracts.messages import FromStage
from encoder_pool.pool import EncoderPool
from lm_engine.engine import LMEngine
from stages.build import build_encoder_pool, build_lm_engine
from stages.encoder_stage import EncoderStage, FeatureReader
from stages.lm_stage import LMStage
from stages.planning import Plan
from stages.shell import StageShell


def make_shells(
    plan: Plan,
    stages: Sequence[str],
    senders: Mapping[tuple[str, str], Sender],
    receivers: Mapping[tuple[str, str], Receiver],
    read: FeatureReader | None,
    emit: Callable[[Sequence[FromStage]], None],
) -> list[StageShell]:
    """Shells of `stages`, none started. Ends of edges by (source, target); `read` maps shared features."""
    shells = []
    for name in stages:
        if name in plan.deployment.encoders:
            assert read is not None, f"stage {name} needs the feature arena"
            logic: EncoderStage | LMStage = _encoder_logic(plan, name, read)
        else:
            logic = _lm_logic(plan, name)
        outgoing = {target: sender for (source, target), sender in senders.items() if source == name}
        incoming = [receiver for (_, target), receiver in receivers.items() if target == name]
        shells.append(StageShell(name, logic, emit, outgoing, incoming))
    return shells


def _encoder_logic(plan: Plan, name: str, read: FeatureReader) -> EncoderStage:
    def build() -> tuple[EncoderPool, str]:
        return build_encoder_pool(plan.family, plan.deployment.encoders[name], plan.stage(name))

    return EncoderStage(name, build, read)


def _lm_logic(plan: Plan, name: str) -> LMStage:
    def build() -> tuple[LMEngine, str]:
        return build_lm_engine(plan.family, plan.deployment.lms[name], plan.stage(name), plan.context_length)

    return LMStage(name, build)
