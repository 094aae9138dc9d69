"""Content parts that hold media: image_url, input_audio, audio_url, video_url, with their options."""

from __future__ import annotations

from typing import NamedTuple, TypeVar, get_args

from api.schemas import AudioUrl, ContentPart, ImageUrl, MediaKwargs, VideoUrl
from api.validation import checked, invalid
from contracts.conversation import MediaPart, Role
from contracts.errors import BadRequest
from contracts.media import Detail, MediaOptions, MediaSource, Modality

MODALITY_OF: dict[str, Modality] = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}
NO_KWARGS = MediaKwargs()
MAX_FORMAT_CHARS = 32

OptionT = TypeVar("OptionT", str, int, float, bool)

_ARTICLE = {"image": "an image", "audio": "sound", "video": "a video"}
_DETAILS: tuple[Detail, ...] = get_args(Detail)


class MediaTaken(NamedTuple):
    """What the model takes, and the request's options for parts that do not say otherwise."""

    modalities: tuple[str, ...]
    kwargs: MediaKwargs


def media_part(part: ContentPart, role: Role, path: str, taken: MediaTaken) -> MediaPart:
    """Raises BadRequest naming the field."""
    assert part.type is not None
    modality, kwargs = MODALITY_OF[part.type], taken.kwargs
    if role != "user":
        what = _ARTICLE[modality]
        raise invalid(
            path, f"holds {what}, which cannot be part of a {role} message; put it into a user message"
        )
    if modality not in taken.modalities:
        accepted = ", ".join(taken.modalities)
        raise invalid(
            f"{path}.type", f"is for {modality} input, which this model does not take; it takes {accepted}"
        )
    match part.type:
        case "image_url":
            url, options = _image(part, path, kwargs)
        case "input_audio":
            url, options = _input_audio(part, path), MediaOptions()
        case "audio_url":
            url, options = _audio_url(part, path), MediaOptions()
        case _:
            url, options = _video(part, path, kwargs)
    if options.with_audio and "audio" not in taken.modalities:
        raise invalid(
            f"{path}.video_url.use_audio_in_video", "needs a model that takes audio, which this one does not"
        )
    return MediaPart(MediaSource(modality=modality, url=url, options=options, param=path))


def _url(url: str | None, path: str) -> str:
    if not url or url.isspace():
        raise invalid(f"{path}.url", "must be a data: or http(s): URL")
    return url.strip()


def _image(part: ContentPart, path: str, kwargs: MediaKwargs) -> tuple[str, MediaOptions]:
    image = part.image_url
    if image is None:
        raise invalid(f"{path}.image_url", "is required in an image_url part")
    if isinstance(image, str):
        image = ImageUrl(url=image)
    url = _url(image.url, f"{path}.image_url")
    detail = _one_of(part.detail, image.detail, f"{path}.image_url.detail")
    known = next((d for d in _DETAILS if d == ("auto" if detail is None else detail)), None)
    if known is None:
        raise invalid(f"{path}.image_url.detail", f"must be one of {', '.join(_DETAILS)}")
    least, most = _pixels(part, image, path, kwargs)
    return url, MediaOptions(detail=known, min_pixels=least, max_pixels=most)


def _pixels(
    part: ContentPart, inner: ImageUrl | VideoUrl, path: str, kwargs: MediaKwargs
) -> tuple[int | None, int | None]:
    """Options may stand in the part or inside its URL object; if in both, they must agree."""
    least = _one_of(part.min_pixels, inner.min_pixels, f"{path}.min_pixels")
    most = _one_of(part.max_pixels, inner.max_pixels, f"{path}.max_pixels")
    for name, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None:
            checked("pixels", value, value, param=f"{path}.{name}")
    least = kwargs.min_pixels if least is None else least
    most = kwargs.max_pixels if most is None else most
    if least is not None and most is not None and least > most:
        raise invalid(f"{path}.min_pixels", "must not be above max_pixels")
    return least, most


def _input_audio(part: ContentPart, path: str) -> str:
    """Bare base64, as the OpenAI clients send, or a data URL; the content decides what format it is."""
    audio = part.input_audio
    if audio is None:
        raise invalid(f"{path}.input_audio", "is required in an input_audio part")
    if not audio.data or audio.data.isspace():
        raise invalid(f"{path}.input_audio.data", "must be the file's bytes in base64")
    name = audio.format or "wav"
    if len(name) > MAX_FORMAT_CHARS or not all(c.isalnum() or c in "/.-_+" for c in name):
        raise invalid(f"{path}.input_audio.format", "must be a format's name, such as 'wav' or 'mp3'")
    if audio.data[:5].lower() == "data:":
        return audio.data
    return f"data:audio/{name};base64,{audio.data}"


def _audio_url(part: ContentPart, path: str) -> str:
    audio = part.audio_url
    if audio is None:
        raise invalid(f"{path}.audio_url", "is required in an audio_url part")
    if isinstance(audio, str):
        audio = AudioUrl(url=audio)
    return _url(audio.url, f"{path}.audio_url")


def _video(part: ContentPart, path: str, kwargs: MediaKwargs) -> tuple[str, MediaOptions]:
    video = part.video_url
    if video is None:
        raise invalid(f"{path}.video_url", "is required in a video_url part")
    if isinstance(video, str):
        video = VideoUrl(url=video)
    path = f"{path}.video_url"
    url = _url(video.url, path)
    fps = _one_of(part.fps, video.fps, f"{path}.fps")
    num_frames = _one_of(part.num_frames, video.num_frames, f"{path}.num_frames")
    max_frames = _one_of(part.max_frames, video.max_frames, f"{path}.max_frames")
    with_audio = _one_of(part.use_audio_in_video, video.use_audio_in_video, f"{path}.use_audio_in_video")
    if fps is None and num_frames is None:
        fps, num_frames = kwargs.fps, kwargs.num_frames
    check_sampling(fps, num_frames, max_frames, f"{path}.")
    least, most = _pixels(part, video, path, kwargs)
    return url, MediaOptions(
        min_pixels=least,
        max_pixels=most,
        fps=fps,
        num_frames=num_frames,
        max_frames=kwargs.max_frames if max_frames is None else max_frames,
        with_audio=bool(kwargs.use_audio_in_video if with_audio is None else with_audio),
    )


def check_kwargs(kwargs: MediaKwargs | None) -> MediaKwargs:
    """The request's own, in range. Raises BadRequest."""
    if kwargs is None:
        return NO_KWARGS
    prefix = "mm_processor_kwargs."
    check_sampling(kwargs.fps, kwargs.num_frames, kwargs.max_frames, prefix)
    for name, value in (("min_pixels", kwargs.min_pixels), ("max_pixels", kwargs.max_pixels)):
        if value is not None:
            checked("pixels", value, value, param=prefix + name)
    return kwargs


def check_sampling(fps: float | None, num_frames: int | None, max_frames: int | None, prefix: str) -> None:
    if fps is not None:
        checked("fps", fps, fps, param=f"{prefix}fps")
    for name, value in (("num_frames", num_frames), ("max_frames", max_frames)):
        if value is not None:
            checked("frames", value, value, param=prefix + name)
    if fps is not None and num_frames is not None:
        raise invalid(f"{prefix}num_frames", "excludes fps: give one of them")


def _one_of(outer: OptionT | None, inner: OptionT | None, param: str) -> OptionT | None:
    if outer is not None and inner is not None and outer != inner:
        raise BadRequest(f"`{param}` is given twice with different values", param=param, code="invalid_value")
    return inner if outer is None else outer
