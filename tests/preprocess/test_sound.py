"""Any sound file gives the samples it holds: right length, right scale, one channel, or a clear refusal."""

from __future__ import annotations

import re

import numpy as np
import pytest

from contracts.errors import MediaDecodeError, MediaTooLarge
from contracts.specs import AudioSpec, MediaLimits
from preprocess.sound import EMPTY, decode_audio
from tests.preprocess.recordings import QWEN2_5_OMNI, QWEN3_OMNI, int16, record, stereo, tone, wav

LIMITS = MediaLimits()
RATE = 16_000


def decoded(data: bytes, spec: AudioSpec = QWEN3_OMNI, **limits: float) -> np.ndarray:
    return decode_audio(data, spec, MediaLimits(**limits)).samples_S


def pitch(samples: np.ndarray) -> float:
    """Hertz of the loudest frequency."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax()) * RATE / len(samples)


FILES = {
    "wav": ("wav", "pcm_s16le", None),
    "wav 24 bit": ("wav", "pcm_s24le", None),
    "wav 32 bit": ("wav", "pcm_s32le", None),
    "wav 8 bit": ("wav", "pcm_u8", None),
    "wav float": ("wav", "pcm_f32le", None),
    "wav double": ("wav", "pcm_f64le", None),
    "wav mu-law": ("wav", "pcm_mulaw", None),
    "wav a-law": ("wav", "pcm_alaw", None),
    "wav adpcm": ("wav", "adpcm_ima_wav", None),
    "aiff": ("aiff", "pcm_s16be", None),
    "mov pcm": ("mov", "pcm_s16le", None),
    "flac": ("flac", "flac", None),
    "flac 24 bit": ("flac", "flac", "s32"),
    "mp3": ("mp3", "libmp3lame", None),
    "aac": ("adts", "aac", None),
    "m4a": ("mp4", "aac", None),
    "alac": ("mov", "alac", None),
    "ogg opus": ("ogg", "libopus", None),
    "webm opus": ("webm", "libopus", None),
    "mkv flac": ("matroska", "flac", None),
    "amr": ("amr", "libopencore_amrnb", None),
    "mp2": ("mp2", "mp2", None),
}
NARROW = {"amr": 8000}
PADDED = {"aac", "m4a", "mp2", "amr", "wav adpcm"}  # no field says how much the encoder has added
LOSSLESS = ("wav", "wav 24 bit", "wav 32 bit", "wav float", "wav double", "aiff", "mov pcm", "flac", "alac")


@pytest.mark.parametrize("name", FILES)
def test_formats_decode_to_the_same_sound(name):
    container, codec, sample_format = FILES[name]
    rate = NARROW.get(name, 48_000)
    data = record(tone(2.0, rate), rate, container, codec, sample_format)
    samples = decoded(data)
    slack = 1024 if name in PADDED else 0
    assert 0 <= len(samples) - 2 * RATE <= slack
    assert pitch(samples[: 2 * RATE]) == pytest.approx(440, abs=1)
    peaks = np.abs(samples[: 2 * RATE]).reshape(32, -1).max(axis=1)
    assert np.median(peaks) == pytest.approx(0.5, abs=0.06)  # lossy encoders overshoot here and there


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("num_channels", [1, 2])
def test_lossless_files_at_the_models_rate_are_exact(name, num_channels):
    container, codec, sample_format = FILES[name]
    left, right = tone(0.5), tone(0.5, hertz=1000, amplitude=0.25)
    channels = left if num_channels == 1 else stereo(left, right)
    samples = decoded(record(channels, RATE, container, codec, sample_format))
    np.testing.assert_allclose(samples, channels.mean(axis=0), atol=1.01 / 32768)


def test_stereo_is_averaged_then_resampled():
    """One second at 48 kHz, the right channel silent: a second of the left channel, half as loud."""
    left = tone(1.0, 48_000)
    samples = decoded(record(stereo(left, np.zeros_like(left)), 48_000, "wav", "pcm_s16le"))
    assert len(samples) == RATE
    assert pitch(samples) == pytest.approx(440, abs=1)
    assert np.abs(samples[2000:-2000]).max() == pytest.approx(0.25, abs=0.005)


@pytest.mark.parametrize("num_channels", [6, 8])
@pytest.mark.parametrize(("container", "codec"), [("wav", "pcm_s16le"), ("flac", "flac")])
def test_many_channels_are_averaged(num_channels, container, codec):
    samples = decoded(record(np.repeat(tone(0.5), num_channels, axis=0), RATE, container, codec))
    np.testing.assert_allclose(samples, tone(0.5)[0], atol=1 / 32768)


def test_eight_planes_of_samples():
    """PyAV alone reads a ninth, from nowhere."""
    samples = decoded(record(np.repeat(tone(0.5, 48_000), 8, axis=0), 48_000, "mp4", "aac"))
    assert pitch(samples[:8000]) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_the_length_is_the_durations_at_every_rate(rate):
    values = int16(tone(1.3, rate))
    sound = decode_audio(wav(values, rate), QWEN3_OMNI, LIMITS)
    assert len(sound.samples_S) == round(len(values) * RATE / rate)
    assert sound.duration_s == pytest.approx(len(values) / rate)
    assert np.abs(sound.samples_S[1000:18_000] - tone(1.3)[0, 1000:18_000]).max() < 2e-3


def test_a_resampled_tone_has_no_image_of_itself():
    samples = decoded(wav(int16(tone(1.0, 8000, 3000)), 8000))[1000:-1000]
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples)))) ** 2
    assert power[int(len(power) * 0.55) :].max() < 1e-8 * power.max()


def test_the_sound_track_of_a_film():
    from tests.preprocess.films import film, moving

    samples = decoded(film(moving(10), fps=10, sound=tone(1.0, 48_000), sound_rate=48_000))
    assert abs(len(samples) - RATE) <= 1024
    assert pitch(samples[:RATE]) == pytest.approx(440, abs=1)


def test_samples_beyond_full_scale_are_kept():
    loud = tone(0.5, amplitude=3.0)
    np.testing.assert_array_equal(decoded(wav(loud[0], tag=3)), loud[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["<f4", "<f8"])
def test_samples_that_are_no_numbers_are_refused(bad, kind):
    values = tone(0.5)[0].astype(kind)
    values[100] = bad
    with pytest.raises(MediaDecodeError, match="not numbers"):
        decoded(wav(values, tag=3))


@pytest.mark.parametrize("level", [1e20, 1e12])
@pytest.mark.parametrize("kind", ["<f4", "<f8"])
def test_samples_no_recording_holds_are_refused(level, kind):
    values = tone(0.5)[0].astype(kind)
    values[100] = -level
    with pytest.raises(MediaDecodeError, match="far beyond"):
        decoded(wav(values, tag=3))
    values[100] = -(2.0**31)  # 32-bit integers written as floats
    assert np.isfinite(decoded(wav(values, tag=3))).all()


def test_nothing_in_it():
    with pytest.raises(MediaDecodeError, match="audio is empty") as caught:
        decoded(wav(int16(tone(0.0))))
    assert caught.value.code == EMPTY
    with pytest.raises(MediaDecodeError, match="zero bytes"):
        decoded(b"")


@pytest.mark.parametrize("seconds", [0.01, 0.0999])
def test_a_very_short_sound_is_filled_with_silence(seconds):
    sound = decode_audio(wav(int16(tone(seconds))), QWEN3_OMNI, LIMITS)
    assert len(sound.samples_S) == QWEN3_OMNI.min_samples
    assert sound.duration_s == pytest.approx(seconds, abs=1e-3)
    assert not sound.samples_S[round(seconds * RATE) + 1 :].any()
    assert sound.samples_S.any()


@pytest.mark.parametrize("missing", [1, 2, 20_000])
@pytest.mark.parametrize("extra", [b"", b"note\3\0\0\0abc\0"])  # of an odd length, so filled up
def test_a_wav_file_cut_short_is_refused(missing, extra):
    whole = wav(int16(tone(0.8)))
    whole = whole[:36] + extra + whole[36:]
    assert len(decoded(whole)) == 0.8 * RATE
    with pytest.raises(MediaDecodeError, match=f"truncated: it holds {25_600 - missing} of 25600 bytes"):
        decoded(whole[:-missing])


def test_bytes_after_the_sound_are_no_matter():
    whole = wav(int16(tone(0.8))) + b"note\3\0\0\0abc"
    assert len(decoded(whole)) == 0.8 * RATE


def test_a_header_without_its_sound_is_empty():
    with pytest.raises(MediaDecodeError, match="audio is empty"):
        decoded(wav(int16(tone(0.8)))[:44])


def test_a_wav_file_of_nothing_but_chunks_ends():
    with pytest.raises(MediaDecodeError):
        decoded(b"RIFF\0\0\0\0WAVE" + b"note\0\0\0\0" * 100_000)


def test_errors_are_told_in_words():
    broken = wav(int16(tone(0.1)))
    for data in (b"junk" * 100, broken[:20] + b"\xff" * 16 + broken[36:], b"OggS" + bytes(200)):
        with pytest.raises(MediaDecodeError) as caught:
            decoded(data)
        assert not re.search(r"Error|Exception|Errno", caught.value.message), caught.value.message


@pytest.mark.parametrize("claimed", [0x7FFFFFFF, 0xFFFFFFFF])
def test_a_header_that_claims_another_size(claimed):
    """As streamed WAV files do: what is there counts, and nothing is refused for what is not."""
    values = int16(tone(0.8))
    assert len(decoded(wav(values, claimed_bytes=claimed))) == len(values)


def test_a_file_cut_short_gives_what_it_holds():
    whole = record(tone(2.0, 48_000), 48_000, "ogg", "libopus")
    samples = decoded(whole[: len(whole) // 2])
    assert RATE // 2 < len(samples) < 2 * RATE


def test_broken_packets_are_skipped():
    data = bytearray(record(tone(2.0, 48_000), 48_000, "mp3", "libmp3lame"))
    middle = len(data) // 2
    data[middle : middle + 600] = bytes(600)
    samples = decoded(bytes(data))
    assert len(samples) == pytest.approx(2 * RATE, abs=4000)


@pytest.mark.parametrize(
    "data",
    [b"junk" * 100, b"\x89PNG\r\n\x1a\n" + bytes(100), b"<html><body>not found</body></html>", bytes(5000)],
)
def test_what_is_no_sound_is_refused_with_the_formats(data):
    with pytest.raises(MediaDecodeError, match=r"not a readable audio file.*wav, mp3|no audio track"):
        decoded(data)


def test_a_playlist_reads_no_other_file(tmp_path):
    secret = tmp_path / "secret.wav"
    secret.write_bytes(wav(int16(tone(0.5))))
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {secret}\n",
    ):
        with pytest.raises(MediaDecodeError, match="not a readable audio file"):
            decoded(text.encode())


def test_too_long_by_the_header_and_by_the_samples():
    with pytest.raises(MediaTooLarge, match="2 s long or more; the limit is 1 s"):
        decoded(wav(int16(tone(2.0))), max_audio_s=1.0)
    unknown = record(tone(2.0, 48_000), 48_000, "adts", "aac")
    with pytest.raises(MediaTooLarge, match="limit is 1 s"):
        decoded(unknown, max_audio_s=1.0)
    spec = AudioSpec(tokens="qwen2_5_omni", tail="zeros", max_samples=RATE)
    with pytest.raises(MediaTooLarge, match="limit is 1 s"):
        decoded(wav(int16(tone(1.001))), spec)
    assert len(decoded(wav(int16(tone(1.0))), spec)) == RATE
    assert QWEN2_5_OMNI.max_samples == 300 * RATE


def test_too_many_channels():
    with pytest.raises(MediaTooLarge, match="2 channels; the limit is 1"):
        decoded(record(stereo(tone(0.2), tone(0.2)), RATE, "wav", "pcm_s16le"), max_audio_channels=1)
