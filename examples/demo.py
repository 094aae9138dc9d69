"""`make demo`: starts a server, asks it about a picture, and says how to go on."""

from __future__ import annotations

import base64
import io

import openai
from local_server import local_server
from PIL import Image, ImageDraw

QUESTIONS = (
    ("text", "What is the capital of France? Answer in one short sentence."),
    ("picture", "Describe this picture in one sentence."),
)


def picture() -> str:
    """A red disc on blue, as a data URL."""
    image = Image.new("RGB", (320, 240), "navy")
    ImageDraw.Draw(image).ellipse((90, 50, 230, 190), fill="red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(client: openai.OpenAI, model: str, kind: str, question: str) -> None:
    content: list[dict[str, object]] = [{"type": "text", "text": question}]
    if kind == "picture":
        content.insert(0, {"type": "image_url", "image_url": {"url": picture()}})
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


def main() -> None:
    print("starting the server (some seconds) ...", flush=True)
    with local_server() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        model = client.models.list().data[0].id
        print(f"{model} is served on {url}")
        for kind, question in QUESTIONS:
            ask(client, model, kind, question)
    print(
        "\nThe language half of the default model is real, its vision tower is untrained: pictures pass"
        "\nthrough it as through a trained one, but it cannot see. To go on:"
        "\n  .venv/bin/omnistage serve                  the default model on port 8000, with a page at /"
        "\n  .venv/bin/omnistage serve /path/to/model   a checkpoint folder of your own"
        "\n  .venv/bin/omnistage chat                   talk to the server in the terminal"
    )


if __name__ == "__main__":
    main()
