"""The training data of speech: held-out sentences stay out, codes say what was spoken when."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch

from tests.tiny_models import build_tokenizer
from training.speaking.corpus import Corpus, CorpusFile
from training.speaking.judge_words import distance, words_of
from training.speaking.phonetics import FRAME, frame_codes, leading_frames, loudness_codes, pitch_codes
from training.speaking.pointing import SOONEST, letters_of, pointer_codes
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


def test_letters_go_with_the_symbols_that_say_them():
    count = {"Room": 1, "42": 2, "is": 1, "mine.": 1}
    spoken = ["rum fɔrti tu ɪz mIn."]
    letters = letters_of("Room 42 is mine.", spoken, set("rumfɔtiɪzIn."), count.__getitem__)
    said = [0, 0, 1, 2, 4, *[5] * 5, 6, 6, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert letters is not None
    assert len(letters) == 1 + len("rum fɔrti tu ɪz mIn.") + 1
    assert letters.tolist() == said


def test_letters_are_not_known_where_words_do_not_match():
    assert letters_of("One two", ["wʌn"], set("wʌn"), lambda _: 1) is None
    assert letters_of("- -", [], set(), lambda _: 0) is None


@pytest.fixture(scope="module")
def prompts():
    merges = [("t", "h"), ("e", "a"), ("Ġ", "s"), ("n", "i"), ("n", "e")]
    return Prompts(build_tokenizer(merges=merges).backend_tokenizer)


def test_a_line_is_spelled_in_step_with_speech(prompts):
    line = prompts.line(prompts.many_ids(["the sea"])[0])
    spelled = line.rows[line.prompt - 1 :].tolist()
    pieces = [prompts.spelling.id_of(piece) for piece in ("th", "e", " s", "ea")]
    assert [token for token in spelled if token in pieces] == pieces
    assert spelled[-1] == TTS_EOS
    assert line.rows[line.prompt - 2] == TTS_BOS
    assert line.letter_ends[:4].tolist() == [2, 3, 5, 7]
    assert line.row_of(np.array([0, 1, 2, 3, 6, 9])).tolist() == [0, 0, 1, 2, 3, 3]


def test_pads_keep_a_long_line_near_its_speech(prompts):
    line = prompts.line(prompts.many_ids(["nine " * 30])[0])
    spoken_frames = 0.74 * 5 * 30
    assert abs(len(line.letter_ends) - (spoken_frames - 6)) < 3
    assert TTS_PAD in line.rows[line.prompt :]


def test_the_pointer_says_how_long_ago_the_piece_was_heard(prompts):
    line = prompts.line(prompts.many_ids(["the sea"])[0])
    codes = pointer_codes(line, np.array([0, 1, 2, 2, 3, 6]))
    assert (codes + SOONEST).tolist() == [0, 1, 1, 2, 2, 2]


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
