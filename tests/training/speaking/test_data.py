"""The training data of speech: held-out sentences stay out, codes say what was spoken when."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch

from model_families.omnistage_nano.pieces import MOST_AHEAD
from model_families.omnistage_nano.pronouncing import Dictionary
from tests.tiny_models import build_tokenizer
from tests.training.speaking.small_front import small_front
from training.speaking.corpus import Corpus, CorpusFile
from training.speaking.corpus import Words as Spoken
from training.speaking.judge_words import distance, words_of
from training.speaking.make_front import LETTER_FRAMES, UNITS_A_FRAME, timed, underivable
from training.speaking.phonetics import FRAME, frame_codes, leading_frames, loudness_codes, pitch_codes
from training.speaking.pointing import SOONEST, joined, pointer_codes, spell, written_words
from training.speaking.prompts import TTS_BOS, TTS_EOS, TTS_PAD, Prompts
from training.speaking.rows import EMPTY_TARGET, Rows
from training.speaking.sentences import Sentences, is_held_out
from training.speaking.sizes import TINY
from training.speaking.table import TextTable
from training.speaking.words import Words

KINDS = ("cat", "dog", "sun", "house", "river", "garden", "table", "music")


@pytest.fixture
def sentences():
    return Sentences(Words(KINDS, KINDS, ("Ada", "Bob"), KINDS, KINDS, KINDS, KINDS, KINDS))


def test_sentences_are_the_same_for_ever_and_disjoint(sentences):
    trained = list(islice(sentences.training(0, 1), 400))
    held_out = sentences.held_out(5)
    assert trained[:20] == list(islice(sentences.training(0, 1), 20))
    assert len(set(trained)) > 300
    assert not {text.lower() for text in trained} & {text.lower() for text in held_out}
    assert all(3 <= len(text.split()) <= 20 for text in held_out)


def test_sentences_and_rows_of_words_are_held_out_apart(sentences):
    mixed = sentences.held_out(12)
    whole, rows = (sentences.held_out(12, grammatical=grammatical) for grammatical in (True, False))
    assert not set(whole) & set(rows)
    assert set(mixed) <= {*whole, *rows}
    assert set(mixed) & set(whole)
    assert set(mixed) & set(rows)
    words = {word.lower() for word in KINDS}
    assert all({one.strip(",.?!").lower() for one in row.split()} <= words for row in rows)
    assert not any({one.strip(",.?!").lower() for one in text.split()} <= words for text in whole)


def test_a_mark_or_a_capital_does_not_bring_a_sentence_back():
    assert is_held_out("The cat runs.") == is_held_out("the CAT, runs!")


def test_workers_share_the_sentences(sentences):
    shares = [set(islice(sentences.training(worker, 3), 100)) for worker in range(3)]
    assert len(shares[0] | shares[1] | shares[2]) > 200


def test_codes_say_what_is_spoken_when():
    ids, units = np.array([7, 8, 9]), np.array([2, 4, 1])  # 50, 100 and 25 ms
    sound = np.full(4 * FRAME, 0.1, np.float32)
    pitch = np.full(14, 120.0, np.float32)
    codes = frame_codes(ids, np.array([3, 4, 6]), units, pitch, sound)
    assert codes[:, 0].tolist() == [9, 0, 0, 0]  # what follows the last moment's
    assert codes[:, 1:5].tolist() == [[7, 7, 8, 8], [8, 8, 8, 9], [9, 0, 0, 0], [0, 0, 0, 0]]
    assert codes[:, 5:7].tolist() == [[25, 25], [25, 25], [0, 0], [0, 0]]  # an octave over the lowest
    assert set(codes[:, 7]) == {25}
    assert codes[:, 8].tolist() == [4, 6, 6, 6]  # the letter that it ends in


def test_pitch_and_loudness_have_bounds():
    assert pitch_codes(np.array([-3.0, 39.0, 60.0, 5000.0], np.float32)).tolist() == [0, 0, 1, 69]
    loud = loudness_codes(np.array([[0.0, 0.0], [1.0, -1.0]], np.float32))
    assert loud.tolist() == [0, 35]


def test_the_corpus_is_read_while_it_grows(tmp_path):
    corpus = Corpus(tmp_path)
    sound, codes = np.arange(3 * FRAME, dtype=np.int16), np.arange(27, dtype=np.int16)
    (tmp_path / "0.pcm").write_bytes(sound.tobytes())
    (tmp_path / "0.codes").write_bytes(codes.tobytes())
    index = tmp_path / "0.jsonl"
    index.write_text(json.dumps(["one", 0, FRAME]) + "\n" + json.dumps(["two", FRAME, 2 * FRAME])[:5])
    assert [found.text for found in corpus.refresh()] == ["one"]
    index.write_text(json.dumps(["one", 0, FRAME]) + "\n" + json.dumps(["two", FRAME, 2 * FRAME]) + "\n")
    (found,) = corpus.refresh()
    assert np.array_equal(corpus.sound(found), sound[FRAME:])
    assert np.array_equal(corpus.codes(found), codes[9:].reshape(2, 9))


def test_what_a_worker_writes_is_read_at_once(tmp_path):
    corpus, codes = Corpus(tmp_path), np.arange(18, dtype=np.int16).reshape(2, 9)
    with CorpusFile(tmp_path, 3, with_codes=True) as written:
        for value in (5, 6):
            written.add(f"say {value}", np.full(2 * FRAME, value, np.int16), codes + value)
            (found,) = corpus.refresh()
            assert (found.text, found.file, found.num_frames) == (f"say {value}", 3, 2)
            assert set(corpus.sound(found)) == {value}
            assert np.array_equal(corpus.codes(found), codes + value)


def test_what_is_said_is_read_and_sound_may_be_left_out(tmp_path):
    said = Spoken(["ðə sˈi."], ["the", "sea"])
    with CorpusFile(tmp_path, 1, with_codes=True, with_sound=False) as written:
        written.add("the sea", np.zeros(FRAME, np.int16), np.zeros((1, 9), np.int16), said)
    (found,) = Corpus(tmp_path).refresh()
    assert found.words == said
    assert not (tmp_path / "1.pcm").exists()
    assert Corpus(tmp_path, with_sound=True).refresh() == []


def test_rows_of_text_and_frames_meet_where_the_server_has_them_meet():
    codes_TQ = torch.arange(3 * TINY.num_groups).view(3, -1) % TINY.codebook_size
    rows = Rows(TINY, torch.tensor([*range(10, 18), 30, 31]), codes_TQ, pad=5)
    batch = rows.batch(
        np.array([[0, 10, 8, 0, 3]]), 11
    )  # eight rows of prompt, two more of text, three frames
    assert batch.text_BL.tolist() == [[*range(10, 18), 30, 31, 5]]
    assert (batch.opening_BL >= 0).tolist() == [[False] * 2 + [True] * 6 + [False] * 3]
    assert batch.heard_BLQ[0, 7].tolist() == [-1] * TINY.num_groups
    assert torch.equal(batch.heard_BLQ[0, 8:], codes_TQ)
    assert torch.equal(batch.target_BLQ[0, 7:10], codes_TQ)
    assert batch.target_BLQ[0, 10].tolist() == [TINY.control["eos"]] + [EMPTY_TARGET] * (TINY.num_groups - 1)
    assert (batch.target_BLQ[0, :7] == EMPTY_TARGET).all()


def test_a_token_without_a_row_is_found_out():
    table = TextTable(torch.tensor([4, 6, 8, 9, 10]), torch.eye(5), torch.device("cpu"))
    assert table.find(np.array([4, 49160])).tolist() == [0, 2]
    with pytest.raises(AssertionError, match="no rows of"):
        table.find(np.array([4, 5]))


@pytest.fixture(scope="module")
def prompts():
    tokenizer = build_tokenizer(merges=[("t", "h")]).backend_tokenizer
    return Prompts(small_front(tokenizer), tokenizer)


def named(prompts, spelled):
    return [prompts.layout.pieces.pieces[piece] for piece in spelled.pieces_N]


def test_a_piece_is_spoken_from_its_first_symbol(prompts):
    spelled = spell(prompts.layout.pieces, ["ðə sˈild, tˈu.", "ðə."])
    assert named(prompts, spelled) == [" ðə", " s", "ˈi", "ld", ",", " t", "ˈu", ".", " ðə", "."]
    # pad ðə blank, s, ˈi, ld, comma, blank t, ˈu, stop, pad; pad ðə, stop
    assert spelled.starts_N.tolist() == [0, 3, 5, 7, 9, 10, 12, 14, 16, 19]
    assert spelled.num_symbols == len("ðə sˈild, tˈu.") + len("ðə.") + 4


def test_letters_are_spread_over_the_symbols_of_their_word(prompts):
    spelled = spell(prompts.layout.pieces, ["ðə sˈi."], ["", "thx"])
    assert named(prompts, spelled) == [" ðə", "= th", "=x", "."]
    assert spelled.starts_N.tolist() == [0, 3, 6, 7]


def test_utterances_are_joined_symbol_behind_symbol(prompts):
    apart, whole = (
        [spell(prompts.layout.pieces, [text]) for text in ("ðə.", "tˈu.")],
        spell(prompts.layout.pieces, ["ðə.", "tˈu."]),
    )
    both = joined(apart)
    assert both.num_symbols == whole.num_symbols
    assert np.array_equal(both.starts_N, whole.starts_N)
    assert np.array_equal(both.pieces_N, whole.pieces_N)


def test_the_letters_of_a_word_are_known_where_words_match():
    count = {"Room": 1, "42": 2, "is": 1, "it's": 1}
    spoken = ["rum fɔrti tu ɪz", "ɪts"]
    assert written_words("Room 42 is it's", spoken, count.__getitem__) == ["room", "", "", "is", "it's"]
    assert written_words("Room 42", spoken, count.__getitem__) == [""] * 5


def test_a_line_has_the_rows_that_the_server_makes(prompts):
    text = "the sea, the sea. " * 12 + "hold two sheep, zz."
    sounds = "ðə sˈi, ðə sˈi. " * 12 + "hˈOld tˈu ʃˈip, zz."
    spelled = spell(prompts.layout.pieces, [sounds], [""] * 51 + ["zz"])
    line, rows_N = prompts.layout.line(spelled)
    served = prompts.of(text)
    assert line.prompt == served.prompt
    assert line.rows.tolist() == served.rows.tolist()
    assert line.rows[-1] == TTS_EOS
    assert line.rows[line.prompt - 2] == TTS_BOS
    assert TTS_PAD in line.rows[line.prompt :]
    first = prompts.layout.pieces.ids.start
    assert (line.rows[line.prompt - 1 + rows_N] - first).tolist() == spelled.pieces_N.tolist()


def test_pads_keep_a_long_line_near_its_speech(prompts):
    spelled = spell(prompts.layout.pieces, ["ðə sˈi " * 40])
    line, _ = prompts.layout.line(spelled)
    frames = sum(prompts.layout.pieces.frames[piece] for piece in spelled.pieces_N)
    assert abs(len(line.rows) - line.prompt - (frames - MOST_AHEAD)) < 3


def test_the_pointer_says_how_long_ago_the_piece_was_heard(prompts):
    spelled = spell(prompts.layout.pieces, ["ðə sˈi."])
    codes = pointer_codes(np.array([0, 1, 2, 3]), spelled, np.array([0, 1, 2, 3, 5, 7]))
    assert (codes + SOONEST).tolist() == [0, 1, 2, 2, 2, 2]


def test_pieces_take_the_time_that_was_counted():
    spoken = [("ðə sˈi.", [13, 2, 2, 1, 4, 1, 5, 6, 2])] * 10
    pieces = dict(timed([" ðə", "sˈi", " s", "i", "ˈi", ".", "=th"], spoken))
    assert pieces[" ðə"] == pytest.approx((3 + 2 + 2) / UNITS_A_FRAME)  # of the pad a frame remains
    assert pieces[" s"] == pytest.approx((1 + 4) / UNITS_A_FRAME)
    assert pieces["."] == pytest.approx((6 + 2) / UNITS_A_FRAME)
    assert pieces["sˈi"] == pytest.approx((4 + 1 + 5) / UNITS_A_FRAME)  # not met: as its sounds
    assert pieces["=th"] == 2 * LETTER_FRAMES


def test_what_rules_derive_is_not_listed():
    words = {
        "tire": "tˈIəɹ",
        "tireless": "tˈIəɹləs",
        "tirelessly": "tˈIəɹləsli",
        "read": "ɹˈid",
        "reads": "ɹˈɛdz",
    }
    kept = underivable(words)
    assert {word: Dictionary(kept).sounds(word) for word in words} == words
    assert set(kept) == {"tire", "read", "reads"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's 42, isn't it?", "its forty two isnt it"),
        (
            "In 1987, $9 and 50% of 3,000.",
            "in nineteen eighty seven nine dollars and fifty percent of three thousand",
        ),
        ("The 3rd of May, 7:05", "the three of may seven zero five"),
    ],
)
def test_words_are_what_is_said(text, words):
    assert " ".join(words_of(text)) == words


def test_the_distance_of_words():
    assert distance(["a", "b", "c", "d"], ["a", "x", "c"]) == 2
    assert distance([], ["a"]) == distance(["a"], []) == 1


def test_one_frame_of_nothing_stays_at_the_beginning():
    codes = np.zeros((6, 9), np.int16)
    assert leading_frames(codes) == 0
    codes[4, 3] = 7
    assert leading_frames(codes) == 3
    codes[0, 1] = 7
    assert leading_frames(codes) == 0
