"""The codes: what the speech package itself knows of its speech, sampled 12.5 times a second.

A frame of 80 ms is nine numbers: the phoneme that comes after it, those at four of its moments, the pitch at
two moments, the loudness; and the letter of the text that is being said, of which the talker's pointer is
made. What comes next is the first: it alone takes reading on in the text, the others follow from it and what
was heard, and the talker's own head, which all its rows teach, draws the first. Nothing is learned here, so
talker and decoder can be trained side by side from the start.
Shapes: L symbols of an utterance, H hops of 12.5 ms, T frames, Q groups.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from training.speaking.sizes import SAMPLE_RATE

FRAME, HOP = 1920, 300  # samples
HOPS_PER_UNIT = 2  # durations count 25 ms
MOMENTS = (0.125, 0.375, 0.625, 0.875)  # of a frame, for phonemes
PITCH_MOMENTS = (0.25, 0.75)
LOWEST_HZ, VOICED_HZ, STEPS_PER_OCTAVE, PITCHES = 60.0, 40.0, 24, 70
QUIETEST_DB, DB_STEP, LOUDNESSES = -70.0, 2.0, 36

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int16]


def frame_codes(ids_L: Ints, letters_L: Ints, units_L: Ints, pitch_H: Floats, sound: Floats) -> Codes:
    """[T, Q] of a sound of whole frames: `ids_L` each held for its units, saying these letters; behind them
    silence, symbol 0."""
    num_frames = len(sound) // FRAME
    hops_L = np.maximum(units_L, 0) * HOPS_PER_UNIT
    symbol_H = np.repeat(np.arange(len(ids_L)), hops_L)
    following = np.append(ids_L, 0)
    start_T = np.arange(num_frames) * FRAME
    last_T = _at(symbol_H, start_T + FRAME - 1, len(ids_L))
    groups = [following[np.minimum(last_T + 1, len(ids_L))]]
    groups += [following[_at(symbol_H, start_T + int(moment * FRAME), len(ids_L))] for moment in MOMENTS]
    pitch = pitch_codes(pitch_H)
    groups += [_at(pitch, start_T + int(moment * FRAME), 0) for moment in PITCH_MOMENTS]
    groups.append(loudness_codes(sound.reshape(num_frames, FRAME)))
    groups.append(letters_L[np.minimum(last_T, len(letters_L) - 1)])
    return np.stack(groups, axis=1).astype(np.int16)


def leading_frames(codes_TQ: Codes) -> int:
    """Frames of nothing at the beginning, but for one: heard as delay, and silence is easily gone on with."""
    says_T = (codes_TQ[:, 1 : 1 + len(MOMENTS)] != 0).any(1)
    return max(int(says_T.argmax()) - 1, 0)


def _at(values_H: Ints, sample_T: Ints, otherwise: int) -> Ints:
    hop_T = sample_T // HOP
    there_T = hop_T < len(values_H)
    if not len(values_H):
        return np.full(len(sample_T), otherwise)
    found_T: Ints = np.where(there_T, values_H[np.minimum(hop_T, len(values_H) - 1)], otherwise)
    return found_T


def pitch_codes(pitch_H: Floats) -> Ints:
    """0 where there is no voice."""
    octaves_H = np.log2(np.maximum(pitch_H, LOWEST_HZ) / LOWEST_HZ)
    step_H = 1 + np.rint(octaves_H * STEPS_PER_OCTAVE).astype(np.int64)
    return np.where(pitch_H > VOICED_HZ, np.minimum(step_H, PITCHES - 1), 0)


def loudness_codes(sound_TS: Floats) -> Ints:
    db_T = 20 * np.log10(np.sqrt(np.square(sound_TS.astype(np.float64)).mean(1)) + 1e-6)
    step_T: Ints = np.rint((db_T - QUIETEST_DB) / DB_STEP).astype(np.int64)
    return np.clip(step_T, 0, LOUDNESSES - 1)


assert SAMPLE_RATE * 2 // 25 == FRAME
