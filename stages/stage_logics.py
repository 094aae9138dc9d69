"""Stage logics and shells of a plan, for whichever process hosts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from connectors.interface import Receiver, Sender
from contracts.messages import FromStage, StageStep
from encoder_pool.pool import EncoderPool
from lm_engine.engine import LMEngine
from lm_engine.talker.engine import TalkerEngine
from stages.build import Compiled, build_encoder_pool, build_lm_engine, build_talker, build_vocoder
from stages.deployment import stage_of
from stages.encoder_stage import EncoderStage, FeatureReader
from stages.gpu_turns import GpuTurns
from stages.lm_stage import LMStage
from stages.planning import Plan
from stages.rank_processes import RankProcesses
from stages.routes import Routes
from stages.shell import StageLogic, StageShell
from stages.start_steps import Tell
from stages.talker_stage import TalkerStage
from stages.vocoder_stage import VocoderStage

Turns = Mapping[tuple[str, str], GpuTurns]  # by encoder and language model


def make_shells(
    plan: Plan,
    stages: Sequence[str],
    senders: Mapping[tuple[str, str], Sender],
    receivers: Mapping[tuple[str, str], Receiver],
    read: FeatureReader | None,
    emit: Callable[[Sequence[FromStage]], None],
    compiled: Compiled | None = None,
) -> list[StageShell]:
    """Shells of `stages`, none started. Ends of edges by (source, target); `read` maps shared features.
    `compiled` waits for kernels that are being compiled ahead."""
    shells = []
    turns = make_turns(plan, stages)
    for name in stages:
        logic = _logic(plan, Routes(plan.family.pipeline), name, read, _teller(name, emit), compiled, turns)
        outgoing = {target: sender for (source, target), sender in senders.items() if source == name}
        incoming = {source: receiver for (source, target), receiver in receivers.items() if target == name}
        shells.append(StageShell(name, logic, emit, outgoing, incoming))
    for (encoder, _), turn in turns.items():
        turn.wake_with(next(shell.wake for shell in shells if shell.name == encoder))
    return shells


def make_turns(plan: Plan, stages: Sequence[str]) -> Turns:
    """Of encoders and language models that share a device in this process. A CPU's cores are shared by
    themselves: turns only where they are asked for."""
    deployment = plan.deployment
    turns: dict[tuple[str, str], GpuTurns] = {}
    for encoder in deployment.encoders.keys() & set(stages):
        device, ahead = plan.stage(encoder).device, deployment.encoders[encoder].max_tokens_ahead
        if ahead is None and device == "cpu":
            continue
        fed = {edge.target for edge in plan.family.pipeline.edges if edge.source == stage_of(encoder)}
        for lm in deployment.lms.keys() & set(stages):
            if stage_of(lm) in fed and plan.stage(lm).device == device:
                turns[encoder, lm] = GpuTurns(ahead or 0)
    return turns


def _teller(name: str, emit: Callable[[Sequence[FromStage]], None]) -> Tell:
    return lambda doing: emit([StageStep(name, doing)])


def _logic(
    plan: Plan,
    routes: Routes,
    name: str,
    read: FeatureReader | None,
    tell: Tell,
    compiled: Compiled | None,
    turns: Turns,
) -> StageLogic:
    deployment = plan.deployment
    if name in deployment.encoders:
        assert read is not None, f"stage {name} needs the feature arena"
        return _encoder_logic(plan, name, read, tell, turns)
    if name in deployment.vocoders:
        return VocoderStage(
            name, lambda: build_vocoder(plan.family, deployment.vocoders[name], plan.stage(name), tell)
        )
    talker, vocoder = routes.speech_path[1:] if routes.speaks else (None, None)
    if name == talker:
        assert vocoder is not None
        return _talker_logic(plan, name, vocoder, tell, compiled)
    own = [turn for (_, lm), turn in turns.items() if lm == name]
    return _lm_logic(plan, name, talker, tell, compiled, own)


def _encoder_logic(plan: Plan, name: str, read: FeatureReader, tell: Tell, turns: Turns) -> EncoderStage:
    def build() -> tuple[EncoderPool, str]:
        return build_encoder_pool(plan.family, plan.deployment.encoders[name], plan.stage(name), tell)

    own = {lm: turn for (encoder, lm), turn in turns.items() if encoder == name}
    return EncoderStage(name, build, read, turns=own)


def _lm_logic(
    plan: Plan,
    name: str,
    talker: str | None,
    tell: Tell,
    compiled: Compiled | None,
    turns: Sequence[GpuTurns],
) -> LMStage:
    def build() -> tuple[LMEngine, str]:
        config = plan.deployment.lms[name]
        ranks = RankProcesses(plan, name) if config.tensor_parallel > 1 else None
        return build_lm_engine(
            plan.family, config, plan.stage(name), plan.contexts[name], ranks, tell, compiled
        )

    return LMStage(name, build, talker, turns)


def _talker_logic(plan: Plan, name: str, vocoder: str, tell: Tell, compiled: Compiled | None) -> TalkerStage:
    def build() -> tuple[TalkerEngine, str]:
        config = plan.deployment.lms[name]
        return build_talker(plan.family, config, plan.stage(name), plan.contexts[name], tell, compiled)

    return TalkerStage(name, vocoder, build)
