"""Every format streams, is one container, and decodes to the samples that went in, to the exact count."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from contracts.errors import BadRequest
from vocoder.containers.encoder import AudioEncoder
from vocoder.containers.formats import FORMATS
from vocoder.containers.retime import MAX_TEMPO, MIN_TEMPO, tempo_factors

RATE = 24_000
TONE_HZ = 440
MAGIC = {"wav": b"RIFF", "mp3": b"\xff", "opus": b"OggS", "aac": b"\xff", "flac": b"fLaC"}
LEAD = {"mp3": 1105, "aac": 1024}  # decoded samples before the first, in formats that cannot say so


def tone(num_samples: int, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(np.arange(num_samples) * 2 * np.pi * TONE_HZ / rate)).astype(np.float32)


def encode(encoder: AudioEncoder, pcm: np.ndarray, chunk: int = 1920) -> list[bytes]:
    parts = [encoder.encode(pcm[start : start + chunk]) for start in range(0, len(pcm), chunk)]
    return [*parts, encoder.finish()]


def decode(data: bytes, name: str) -> tuple[np.ndarray, int]:
    """float samples and their rate, by FFmpeg, told the container (a probe needs more than a short clip)."""
    if name == "pcm":
        return np.frombuffer(data, "<i2") / 32768, RATE
    muxer = {"opus": "ogg", "aac": "aac"}.get(name, name)
    with av.open(io.BytesIO(data), format=muxer) as container:
        frames = list(container.decode(audio=0))
        rate = container.streams.audio[0].rate
    samples = np.concatenate([frame.to_ndarray().ravel() for frame in frames])
    return (samples / 32768 if samples.dtype == np.int16 else samples), rate


@pytest.mark.parametrize("num_samples", [1, 576, 24_000, 24_012, 24_100, 24_500])
@pytest.mark.parametrize("name", FORMATS)
def test_a_decoder_gives_back_the_stated_number_of_samples(name, num_samples):
    encoder = AudioEncoder(name, RATE)
    samples, rate = decode(b"".join(encode(encoder, tone(num_samples))), name)
    assert encoder.num_samples == num_samples
    assert len(samples) == encoder.num_decoded_samples
    if name not in LEAD:
        assert len(samples) * RATE == num_samples * rate, (
            "exact, but for the codecs that cannot say where they end"
        )


@pytest.mark.parametrize("name", FORMATS)
def test_the_sound_survives(name):
    samples, rate = decode(b"".join(encode(AudioEncoder(name, RATE), tone(RATE))), name)
    lead = LEAD.get(name, 0)
    heard, said = samples[lead : lead + rate], tone(rate, rate)
    middle = slice(rate // 10, rate - rate // 10)
    noise = np.mean((heard[middle] - said[middle]) ** 2) / np.mean(said[middle] ** 2)
    assert noise < (1e-6 if name in ("wav", "pcm", "flac") else 0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_come_while_the_sound_is_made_and_do_not_depend_on_the_chunks(name):
    encoder = AudioEncoder(name, RATE)
    parts = encode(encoder, tone(RATE))
    early = b"".join(parts[: len(parts) // 2])
    whole = b"".join(parts)
    assert len(early) > 0.3 * len(whole)
    assert whole == b"".join(encode(AudioEncoder(name, RATE), tone(RATE), chunk=777))
    if name in MAGIC:
        assert whole.startswith(MAGIC[name])
    if name in ("wav", "flac"):
        assert whole.count(MAGIC[name]) == 1
    assert b"Lavf" not in whole, "the libraries do not sign the response"


def test_a_wav_of_unknown_length_says_so():
    data = b"".join(encode(AudioEncoder("wav", RATE), tone(100)))
    assert data[4:8] == data[40:44] == b"\xff\xff\xff\xff"
    assert len(data) == 44 + 200


@pytest.mark.parametrize("speed", [0.25, 0.3, 0.8, 1.0, 1.25, 1.7, 2.5, 4.0])
def test_speed_changes_the_length_exactly_and_keeps_the_pitch(speed):
    encoder = AudioEncoder("pcm", RATE, speed)
    num_samples = 2 * RATE + 17
    parts = encode(encoder, tone(num_samples), chunk=1365)
    assert any(parts[:-1]), "it streams"
    samples, _ = decode(b"".join(parts), "pcm")
    assert len(samples) == encoder.num_samples == round(num_samples / speed)
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    assert abs(spectrum.argmax() * RATE / len(samples) - TONE_HZ) < 8
    loudness = np.sqrt(np.mean(samples[-len(samples) // 20 :] ** 2))
    assert loudness > 0.1, "the end is not cut off"


@pytest.mark.parametrize(
    ("name", "speed"), [("opus", 1.5), ("mp3", 0.5), ("aac", 2.0), ("flac", 4.0), ("wav", 0.25)]
)
def test_speed_works_in_every_container(name, speed):
    encoder = AudioEncoder(name, RATE, speed)
    samples, _ = decode(b"".join(encode(encoder, tone(RATE))), name)
    assert encoder.num_samples == round(RATE / speed)
    assert len(samples) == encoder.num_decoded_samples


@pytest.mark.parametrize(("rate", "name", "encoded"), [(44_100, "opus", 48_000), (22_050, "opus", 24_000)])
def test_a_rate_that_the_codec_lacks_is_raised(rate, name, encoded):
    encoder = AudioEncoder(name, rate)
    samples, decoded_rate = decode(b"".join(encode(encoder, tone(rate, rate))), name)
    assert (encoder.sample_rate, encoder.num_samples) == (encoded, encoded)
    assert (len(samples), decoded_rate) == (48_000, 48_000)


def test_loud_samples_are_clipped_not_wrapped():
    encoder = AudioEncoder("pcm", RATE)
    loud = np.array([2.0, 1.0, -1.0, -7.0, 0.5], np.float32)
    assert np.frombuffer(encoder.encode(loud), "<i2").tolist() == [32767, 32767, -32768, -32768, 16384]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_silence_of_no_length_ends_well(name, speed):
    encoder = AudioEncoder(name, RATE, speed)
    assert isinstance(encoder.encode(np.empty(0, np.float32)) + encoder.finish(), bytes)
    assert encoder.num_samples == 0


def test_an_encoder_may_be_dropped_unfinished():
    for name in FORMATS:
        AudioEncoder(name, RATE).encode(tone(3000))


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(
        BadRequest, match="'ogg' is not supported; choose one of: wav, pcm, mp3, opus, aac, flac"
    ):
        AudioEncoder("ogg", RATE)


@pytest.mark.parametrize("speed", [0.25, 0.26, 0.5, 1.0, 2.0, 2.1, 4.0])
def test_tempo_factors_multiply_to_the_speed(speed):
    factors = tempo_factors(speed)
    assert np.prod(factors) == pytest.approx(speed)
    assert all(MIN_TEMPO <= factor <= MAX_TEMPO for factor in factors)
