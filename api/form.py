"""multipart/form-data bodies: bounded while they are read, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from api.schemas import too_large
from contracts.errors import BadRequest

MAX_FIELDS = 64
MAX_TEXT_BYTES = 64 << 10  # of one field that is no file
_BYTES_AS_TEXT = "latin-1"  # the parser's charset: a character for each byte
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{1,200}")


@dataclass(frozen=True)
class Form:
    data: FormData
    files: dict[str, bytes]

    def text(self, name: str) -> str | None:
        """None: absent or empty, which forms cannot tell apart."""
        value = self.data.get(name)
        return _text(name, value) if value else None

    def texts(self, name: str) -> list[str]:
        """Those that are not empty."""
        return [_text(name, value) for value in self.data.getlist(name) if value]

    def flag(self, name: str) -> bool:
        match (self.text(name) or "false").lower():
            case "true" | "1":
                return True
            case "false" | "0":
                return False
            case _:
                raise BadRequest(f"`{name}` must be true or false", param=name, code="invalid_value")

    def file(self, name: str) -> bytes | None:
        if name in self.files:
            return self.files[name]
        if self.data.get(name) is not None:
            raise BadRequest(f"`{name}` must be a file", param=name, code="invalid_type")
        return None


def _text(name: str, value: UploadFile | str) -> str:
    if isinstance(value, UploadFile):
        raise BadRequest(f"`{name}` must be text, not a file", param=name, code="invalid_type")
    try:
        return value.encode(_BYTES_AS_TEXT).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"`{name}` must be text in UTF-8", param=name, code="invalid_value") from None


async def read_form(request: Request, max_bytes: int) -> Form:
    """Raises PayloadTooLarge before more than `max_bytes` are read, BadRequest for anything but a form."""
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise BadRequest("send the recording as multipart/form-data", code="invalid_content_type")
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > max_bytes:
        raise too_large(max_bytes)
    parser = MultiPartParser(
        Headers({"content-type": _as_bytes(kind)}),
        _bounded(request, max_bytes),
        max_files=4,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_TEXT_BYTES,
    )
    try:
        data = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"the form could not be read: {error.message}", code="invalid_form") from None
    try:
        files = {name: await value.read() for name, value in data.items() if isinstance(value, UploadFile)}
    finally:
        await data.close()
    return Form(data, files)


def _as_bytes(kind: str) -> str:
    """The content type, its charset ours: a client's would choose among all of Python's codecs, some of which
    fail in ways of their own. Raises BadRequest for a boundary that is none."""
    boundary = parse_options_header(kind)[1].get(b"boundary", b"").decode("latin-1")
    if not _BOUNDARY.fullmatch(boundary):
        raise BadRequest("the form could not be read: its boundary is missing or none", code="invalid_form")
    return f'multipart/form-data; boundary="{boundary}"; charset={_BYTES_AS_TEXT}'


async def _bounded(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large(max_bytes)
        yield chunk
