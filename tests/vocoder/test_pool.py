"""The pool: exact streams whatever the schedule, bounded, fair, and a player that never runs dry."""

from __future__ import annotations

import random

import pytest
import torch

from contracts.messages import Failed
from tests.vocoder.fakes import CODES, SAMPLES_PER_FRAME, Clock, FakeVocoder, frames, one_shot
from vocoder.pool import Pcm, VocoderPool, VocoderPoolConfig
from vocoder.ramp import RampConfig

FRAME_S = 0.08


def new_pool(**options) -> tuple[VocoderPool, FakeVocoder, Clock]:
    model, clock = FakeVocoder(), Clock()
    return VocoderPool(model, VocoderPoolConfig(**options), "vocoder", clock), model, clock


def run_dry(pool: VocoderPool) -> dict[str, list]:
    """Steps while there is work, checking the laws after every step; outcomes by request."""
    outcomes: dict[str, list] = {}
    while pool.has_work():
        for outcome in pool.step():
            outcomes.setdefault(outcome.request_id, []).append(outcome)
        assert pool.check_integrity() is None
    return outcomes


def samples(outcomes: list) -> torch.Tensor:
    return torch.cat([pcm.samples for pcm in outcomes])


def test_the_first_frame_is_decoded_alone_and_at_once():
    pool, model, _ = new_pool()
    pool.add("a", "amber", seed=3)
    assert not pool.has_work()
    assert pool.due_in_s() is None
    pool.frames("a", frames(1, 2, 3, 4, 5), last=False)
    assert pool.has_work()
    (first,) = pool.step()
    assert model.calls == [[(1, False)]]
    assert model.opened == [("amber", 3)]
    assert (first.samples.numel(), first.last) == (SAMPLES_PER_FRAME - 1, False)


def test_any_schedule_of_many_streams_gives_each_its_own_samples():
    rng = random.Random(5)
    pool, _, clock = new_pool(max_batch_rows=4)
    spoken = {f"r{i}": [rng.randrange(CODES) for _ in range(rng.randrange(1, 40))] for i in range(12)}
    left, got = {}, {name: [] for name in spoken}
    waiting = dict(spoken)
    while waiting or left or not pool.is_idle:
        if waiting and rng.random() < 0.4:
            name = next(iter(waiting))
            left[name] = waiting.pop(name)
            pool.add(name, "amber")
        if left:
            name = rng.choice(list(left))
            size = rng.randrange(0, 6)
            now, left[name] = left[name][:size], left[name][size:]
            assert pool.frames(name, frames(*now), last=not left[name])
            if not left[name]:
                del left[name]
        clock.now_s += rng.random() * 0.05
        if pool.has_work():
            for pcm in pool.step():
                got[pcm.request_id].append(pcm)
        assert pool.check_integrity() is None
        clock.now_s += min(pool.due_in_s() or 0.0, 0.1)
    for name, codes in spoken.items():
        assert torch.equal(samples(got[name]), one_shot(*codes)), name
        assert [pcm.last for pcm in got[name]] == [False] * (len(got[name]) - 1) + [True]


def test_streams_at_different_places_share_a_forward():
    pool, model, _ = new_pool()
    pool.add("old", "amber")
    pool.frames("old", frames(1), last=False)
    pool.step()
    pool.add("new", "basalt")
    pool.frames("old", frames(2), last=True)
    pool.frames("new", frames(3, 4), last=False)
    pool.step()
    assert sorted(model.calls[1]) == [(1, False), (1, True)]


def test_an_end_without_frames_still_ends_the_stream():
    pool, _, _ = new_pool()
    pool.add("a", "amber")
    pool.frames("a", frames(1), last=False)
    run_dry(pool)
    pool.frames("a", frames(), last=True)
    (pcm,) = run_dry(pool)["a"]
    assert (pcm.samples.numel(), pcm.last) == (0, True)
    assert pool.is_idle


@pytest.mark.parametrize(("speed", "largest"), [(1.3, 1), (4.0, 8)])
def test_the_player_never_runs_dry_and_chunks_grow_with_the_lead(speed, largest):
    """A talker `speed` times as fast as the player; a forward takes no time here, the margin covers what is
    withheld."""
    pool, model, clock = new_pool(ramp=RampConfig(max_chunk_frames=8, margin_s=0.02))
    pool.add("a", "amber")
    pool.frames("a", frames(1), last=False)
    pool.step()
    for index in range(1, 200):
        arrives_s = clock.now_s + FRAME_S / speed
        while (due := pool.due_in_s()) is not None and clock.now_s + due < arrives_s:
            clock.now_s += due
            run_dry(pool)
        clock.now_s = arrives_s
        pool.frames("a", frames(1), last=index == 199)
        run_dry(pool)
    sizes = [call[0][0] for call in model.calls]
    assert pool.stats()["vocoder_underruns_total"] == 0
    assert sizes[0] == 1
    assert max(sizes) >= largest
    assert sizes.index(max(sizes)) > 1, "the ramp climbs, it does not jump"
    assert sum(sizes) == 200


def test_a_stalled_talker_does_not_hold_frames_back_beyond_the_deadline():
    pool, _, clock = new_pool(ramp=RampConfig(max_chunk_frames=16, margin_s=0.05))
    pool.add("a", "amber")
    for _ in range(12):
        pool.frames("a", frames(1), last=False)
        run_dry(pool)
        clock.now_s += FRAME_S / 8
    assert not pool.has_work()
    pending = pool.stats()["vocoder_pending_frames"]
    assert pending > 0
    clock.now_s += pool.due_in_s()
    assert pool.has_work()
    run_dry(pool)
    assert pool.stats()["vocoder_underruns_total"] == 0


def test_a_late_frame_is_counted_as_an_underrun():
    pool, _, clock = new_pool()
    pool.add("a", "amber")
    pool.frames("a", frames(1), last=False)
    run_dry(pool)
    clock.now_s += 1.079
    pool.frames("a", frames(1), last=True)
    run_dry(pool)
    stats = pool.stats()
    assert stats["vocoder_underruns_total"] == 1
    assert stats["vocoder_underrun_seconds_total"] == pytest.approx(1.0)


def test_skipped_samples_are_made_but_not_handed_out():
    pool, model, _ = new_pool()
    pool.add("a", "amber", skip_samples=200)
    pool.frames("a", frames(1, 2, 3, 4), last=True)
    assert torch.equal(samples(run_dry(pool)["a"]), one_shot(1, 2, 3, 4)[200:])
    assert model.calls[0] == [(4, True)], "what nobody hears needs no ramp"


def test_a_bad_stream_fails_alone():
    pool, model, _ = new_pool()
    for name, code in (("a", 1), ("b", 2), ("c", 3)):
        pool.add(name, "amber")
        pool.frames(name, frames(code), last=True)
    model.poison = {2}
    outcomes = run_dry(pool)
    assert isinstance(outcomes["b"][0], Failed)
    assert outcomes["b"][0].error.stage == "vocoder"
    assert torch.equal(samples(outcomes["a"]), one_shot(1))
    assert torch.equal(samples(outcomes["c"]), one_shot(3))
    assert pool.is_idle


@pytest.mark.parametrize(
    "bad", [frames(CODES), frames(-1), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2)]
)
def test_frames_that_are_no_codes_fail_their_stream_alone(bad):
    pool, _, _ = new_pool()
    pool.add("a", "amber")
    pool.add("b", "amber")
    pool.frames("a", frames(1), last=False)
    pool.frames("a", bad, last=False)
    pool.frames("b", frames(1), last=True)
    outcomes = run_dry(pool)
    assert isinstance(outcomes["a"][0], Failed)
    assert isinstance(outcomes["b"][0], Pcm)
    assert pool.frames("a", frames(1), last=False) is False
    assert pool.is_idle


def test_the_bounds_hold():
    pool, model, _ = new_pool(max_streams=2, max_batch_rows=2, max_pending_frames=4)
    for name in "abc":
        pool.add(name, "amber")
    (failed,) = pool.step()
    assert (failed.request_id, failed.error.kind) == ("c", "TooManyRequests")
    pool.frames("a", frames(1, 2, 3, 4), last=False)
    pool.frames("a", frames(5), last=False)
    (failed,) = pool.step()
    assert (failed.request_id, failed.error.kind) == ("a", "EngineError")
    for name in "de":
        pool.add(name, "amber")
    assert [o.request_id for o in pool.step()] == ["e"]
    for name in "bd":
        pool.frames(name, frames(1), last=True)
    run_dry(pool)
    assert max(len(call) for call in model.calls) <= 2
    assert pool.is_idle


def test_an_unknown_voice_is_the_clients_fault():
    pool, model, _ = new_pool()
    pool.add("a", "granite")
    (failed,) = pool.step()
    assert (failed.error.kind, failed.error.param) == ("BadRequest", "voice")
    assert model.opened == []


def test_abort_leaves_nothing():
    pool, _model, _ = new_pool(max_streams=1)
    pool.add("a", "amber")
    pool.frames("a", frames(1, 2), last=False)
    pool.step()
    pool.add("b", "amber")
    pool.abort("b")
    pool.abort("a")
    pool.abort("a")
    assert pool.is_idle
    assert pool.check_integrity() is None
    assert not pool.has_work()
    assert pool.frames("a", frames(1), last=True) is False
    assert pool.stats()["vocoder_pending_frames"] == 0
