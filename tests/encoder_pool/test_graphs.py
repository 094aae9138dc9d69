"""Towers' graphs by a recorder that stands for them: what is captured when, kept how long, and equal."""

from __future__ import annotations

import logging

import pytest
import torch

from encoder_pool import graphs
from encoder_pool.graphs import TowerGraphs
from tests.encoder_pool.graph_fakes import Reruns, SumTower, graphed, rows


def test_a_layout_is_captured_when_it_comes_again_and_replayed_from_then_on():
    recorder = Reruns()
    tower = graphed(recorder)
    for seed, (recorded, runs) in enumerate([(0, 0), (2, 0), (2, 1), (2, 2)]):  # one is the largest
        pixels = rows(8, seed)
        assert torch.equal(tower.embed(pixels)[0], SumTower().embed(pixels)[0])
        assert (recorder.recorded, recorder.runs) == (recorded, runs)
    assert tower.num_replays == 2
    assert SumTower().num_replays == 0


def test_layouts_take_turns_and_results_outlive_the_next_replay():
    recorder = Reruns()
    tower = graphed(recorder)
    batches = [(rows(8, 1),), (rows(4, 2), rows(6, 3)), (rows(6, 4), rows(4, 5)), (rows(10, 6),)]
    found = [tower.embed(*batch) for _ in range(4) for batch in batches]
    for index, results in enumerate(found):
        for result, expected in zip(results, SumTower().embed(*batches[index % 4]), strict=True):
            assert torch.equal(result, expected)
    assert recorder.recorded == 5
    assert recorder.runs == 8
    captured = [result for results in found[4:] for result in results]
    assert len({result.untyped_storage().data_ptr() for result in captured}) == len(captured)
    assert all(result.untyped_storage().nbytes() == result.nbytes for result in captured)


def test_what_is_larger_than_the_bound_runs_plainly():
    tower = graphed(Reruns(), max_rows=8)
    for _ in range(4):
        tower.embed(rows(10))
        tower.embed(rows(8))
    assert len(tower.graphs) == 1
    assert tower.laid_out.count((10,)) == 4


def test_what_has_more_tokens_than_the_largest_runs_plainly(monkeypatch, caplog):
    """Of short items tokens may be more than of one long one."""
    tower, recorder = SumTower(), Reruns()
    monkeypatch.setattr(tower, "num_tokens", lambda key: 33 if len(key) > 1 else sum(key) // 2)
    tower.graphs = TowerGraphs(tower, 1 << 20, 64, lambda: recorder)
    for _ in range(3):
        tower.embed(rows(30), rows(34))
    assert recorder.recorded == 1
    assert not caplog.records


def test_the_graphs_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(graphs, "KEPT_GRAPHS", 2)
    monkeypatch.setattr(graphs, "BATCHES_PER_CAPTURE", 1)
    recorder = Reruns()
    tower = graphed(recorder)
    for size in (2, 4, 2, 4, 2, 6, 6):  # 4 goes
        tower.embed(rows(size))
    assert recorder.recorded == 4
    assert len(tower.graphs) == 2
    tower.embed(rows(2))
    tower.embed(rows(6))
    assert (recorder.recorded, recorder.runs) == (4, 3)
    tower.embed(rows(4))
    assert recorder.recorded == 5


def test_the_rows_of_all_graphs_are_bounded(monkeypatch):
    monkeypatch.setattr(graphs, "KEPT_BATCHES", 2)
    monkeypatch.setattr(graphs, "BATCHES_PER_CAPTURE", 1)
    tower = graphed(Reruns(), max_rows=10)
    for size in (10, 8, 2, 4):
        tower.embed(rows(size))
        tower.embed(rows(size))
    assert len(tower.graphs) == 3  # 10 went for 4
    assert tower.graphs._kept_rows == 14


def test_sizes_that_put_each_other_out_are_seldom_captured(monkeypatch):
    monkeypatch.setattr(graphs, "KEPT_GRAPHS", 2)
    recorder = Reruns()
    tower = graphed(recorder)
    for _ in range(32):
        for size in (2, 4, 6):
            tower.embed(rows(size))
    assert recorder.recorded <= 3 + 96 // graphs.BATCHES_PER_CAPTURE


def test_layouts_met_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(graphs, "MET_LAYOUTS", 3)
    recorder = Reruns()
    tower = graphed(recorder)
    for size in (2, 4, 6, 8, 2):
        tower.embed(rows(size))
    assert recorder.recorded == 0
    tower.embed(rows(8))
    assert recorder.recorded == 2


def test_the_largest_batch_is_what_there_is_room_for():
    """Of 64 rows 6,400 bytes between, which is too much; of 44 there is room for their buffers as well."""
    recorders = [Reruns(lambda _: 6400), Reruns(lambda _: 4000)]
    tower = graphed(*recorders, num_bytes=6000)
    assert tower.graphs.reserve()
    assert 0 < tower.graphs.max_rows < 48
    assert tower.graphs.held_bytes <= 6000 * graphs.LARGEST_SHARE
    assert recorders[1].recorded == 1


def test_without_room_nothing_is_captured():
    recorders = [Reruns(lambda _: 1 << 40) for _ in range(20)]
    tower = graphed(*recorders, num_bytes=6000)
    for _ in range(3):
        tower.embed(rows(8))
    assert tower.graphs.max_rows == 0
    assert tower.graphs.held_bytes == 0
    assert sum(recorder.recorded for recorder in recorders) < 8


def test_memory_that_ends_leaves_room_for_less():
    class Full(Reruns):
        def record(self, run):
            raise torch.OutOfMemoryError("no memory")

    tower = graphed(Full(), Full(), Reruns())
    assert tower.graphs.reserve()
    assert tower.graphs.max_rows == 16


@pytest.mark.parametrize("least", [8, 0])
def test_towers_that_have_no_smaller_batch_are_not_captured(monkeypatch, caplog, least):
    """Sounds are of whole chunks, pictures of whole blocks."""
    tower = graphed(*(Reruns(lambda _: 6000) for _ in range(20)), num_bytes=6000, max_rows=32)
    monkeypatch.setattr(tower, "largest", lambda num_rows: (max(num_rows // 8 * 8, least),))
    assert not tower.graphs.reserve()
    assert tower.graphs.max_rows == 0
    assert not caplog.records


def test_a_graph_beyond_the_bytes_gives_all_back_and_is_not_captured_again():
    first, second = Reruns(lambda graphs: 1000 * graphs), Reruns()
    tower = graphed(first, second, num_bytes=5600)
    for size in (2, 4, 6, 8):
        for _ in range(3):
            pixels = rows(size)
            assert torch.equal(tower.embed(pixels)[0], SumTower().embed(pixels)[0])
    assert first.recorded == 5
    assert tower.graphs.held_bytes == 0
    for _ in range(3):
        tower.embed(rows(8))
        tower.embed(rows(2))
    assert second.recorded == 2  # the largest, and 2
    assert len(tower.graphs) == 1


def test_a_layout_that_cannot_be_captured_runs_plainly_and_is_told_once(caplog):
    recorder = Reruns(fails=(1, 3))
    tower = graphed(recorder)
    with caplog.at_level(logging.WARNING):
        for size in (4, 6, 8):
            for _ in range(4):
                pixels = rows(size)
                assert torch.equal(tower.embed(pixels)[0], SumTower().embed(pixels)[0])
    assert recorder.recorded == 4
    assert recorder.runs == 2  # of 6 rows
    assert len(tower.graphs) == 1
    assert caplog.text.count("could not be captured") == 1


def test_where_the_largest_cannot_be_captured_nothing_is():
    recorder = Reruns(fails=(0,))
    tower = graphed(recorder)
    for _ in range(4):
        tower.embed(rows(4))
    assert recorder.recorded == 1
    assert tower.graphs.max_rows == 0


def test_dropped_graphs_are_captured_again():
    first, second = Reruns(), Reruns()
    tower = graphed(first, second)
    for _ in range(3):
        tower.embed(rows(4))
    tower.drop_graphs()
    tower.drop_graphs()
    assert len(tower.graphs) == 0
    assert tower.graphs.held_bytes == 0
    for _ in range(3):
        assert torch.equal(tower.embed(rows(4))[0], SumTower().embed(rows(4))[0])
    assert (first.recorded, second.recorded, second.runs) == (2, 2, 1)


def test_an_error_of_the_forward_itself_is_the_caller_s(monkeypatch):
    tower = graphed(Reruns())
    tower.embed(rows(4))
    monkeypatch.setattr(tower, "weight", torch.zeros(5, 2))
    with pytest.raises(RuntimeError, match="shapes"):
        tower.embed(rows(4))
