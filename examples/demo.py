"""`make demo`: starts a server, asks it what it can answer, in writing, about a picture and aloud, and says
how to
go on."""

from __future__ import annotations

import base64
import io
import tempfile
import wave
from pathlib import Path

import openai
from local_server import local_server
from PIL import Image, ImageDraw

from model_families.default_model.shipped import SEEING

TEXT = "What is the capital of France? Answer in one short sentence."
DESCRIBE, COLOUR = "What is in the picture?", "What colour is the background?"
SPOKEN = Path(__file__).with_name("question.ogg")  # says: What is the capital of France?
READ_ALOUD = "Hello. This is the voice of a very small model."
BLIND = (
    "\nThe language half of the default model is real, its vision tower is untrained: pictures pass"
    "\nthrough it as through a trained one, but it cannot see."
)


def picture() -> str:
    """A red disc on blue, as a data URL."""
    image = Image.new("RGB", (320, 240), "navy")
    ImageDraw.Draw(image).ellipse((90, 50, 230, 190), fill="red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def sound() -> dict[str, object]:
    data = base64.b64encode(SPOKEN.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "ogg"}}


def ask(client: openai.OpenAI, model: str, kind: str, question: str, *media: dict[str, object]) -> None:
    content = [*media, *([{"type": "text", "text": question}] if kind != "sound" else [])]
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(f"\n[{kind}] {question}\n> ", end="", flush=True)
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(
                f"\n  ({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated)"
            )


def read_aloud(client: openai.OpenAI, model: str) -> None:
    speech = client.audio.speech.create(
        model=model, voice="heart", input=READ_ALOUD, response_format="wav", extra_body={"stream": False}
    )
    file = Path(tempfile.gettempdir(), "omnistage-demo.wav")
    file.write_bytes(speech.content)
    with wave.open(str(file)) as wav:
        seconds = wav.getnframes() / wav.getframerate()
    print(f"\n[speech] {READ_ALOUD}\n> {file} ({seconds:.1f} s)")


def show_all(client: openai.OpenAI) -> None:
    """What the served model takes and gives."""
    model = client.models.list().data[0]
    taken, given = (getattr(model, f"{way}_modalities") for way in ("input", "output"))
    print(f"{model.id} is served: it takes {', '.join(taken)} and gives {', '.join(given)}")
    shown: dict[str, object] = {"type": "image_url", "image_url": {"url": picture()}}
    ask(client, model.id, "text", TEXT)
    ask(client, model.id, "picture", DESCRIBE, shown)
    if SEEING.exists():
        ask(client, model.id, "picture", COLOUR, shown)
    if "audio" in taken:
        ask(client, model.id, "sound", "(a recording of someone asking for the capital of France)", sound())
    if "audio" in given:
        read_aloud(client, model.id)


def main() -> None:
    print("starting the server (some seconds) ...", flush=True)
    with local_server() as url:
        show_all(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))
    if not SEEING.exists():
        print(BLIND)
    print(
        "\nTo go on:"
        "\n  .venv/bin/omnistage serve                  the default model on port 8000, with a page at /"
        "\n  .venv/bin/omnistage serve /path/to/model   a checkpoint folder of your own"
        "\n  .venv/bin/omnistage chat                   talk to the server in the terminal"
    )


if __name__ == "__main__":
    main()
