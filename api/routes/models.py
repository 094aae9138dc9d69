"""GET /v1/models, POST /tokenize and /detokenize: what the server tells of its model."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api.conversation import conversation_of
from api.responses import Detokenized, Model, ModelList, Tokenized
from api.routes.base import Api, json_response
from api.schemas import DetokenizeRequest, TokenizeRequest
from api.validation import check_model, invalid
from contracts.errors import BadRequest

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def routes(api: Api) -> list[BaseRoute]:
    return [
        Route("/v1/models", partial(_models, api), methods=["GET"]),
        Route("/v1/models/{name:path}", partial(_one_model, api), methods=["GET"]),
        Route("/tokenize", partial(_tokenize, api), methods=["POST"]),
        Route("/detokenize", partial(_detokenize, api), methods=["POST"]),
    ]


def _model(api: Api, name: str) -> Model:
    card = api.service.card
    return Model(
        id=name,
        created=card.created,
        root=card.names[0],
        max_model_len=card.context_length,
        family=card.family,
        input_modalities=card.input_modalities,
        output_modalities=card.output_modalities,
        description=card.description,
    )


async def _models(api: Api, request: Request) -> Response:
    return json_response(ModelList(data=[_model(api, name) for name in api.service.card.names]))


async def _one_model(api: Api, request: Request) -> Response:
    return json_response(_model(api, check_model(request.path_params["name"], api.service.card)))


async def _tokenize(api: Api, request: Request) -> Response:
    """Media parts count as their one placeholder each: expanding them needs the media."""
    body = await api.read(request, _tokenize_decoder)
    check_model(body.model, api.service.card)
    # Long texts take a while; the tokenizer may be read from any thread.
    ids = await asyncio.to_thread(_token_ids, api, body)
    tokenizer = api.service.tokenizer
    return json_response(
        Tokenized(
            count=len(ids),
            max_model_len=api.service.card.context_length,
            tokens=ids,
            token_strs=[tokenizer.token_text(i) for i in ids] if body.return_token_strs else None,
        )
    )


def _token_ids(api: Api, body: TokenizeRequest) -> list[int]:
    tokenizer = api.service.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either `prompt` or `messages`", param="prompt", code="invalid_value")
    if body.prompt is not None:
        special = body.add_special_tokens
        # As the service encodes the prompt of /v1/completions.
        return tokenizer.encode(
            body.prompt, add_special_tokens=True if special is None else special, parse_special=True
        )
    assert body.messages is not None
    return tokenizer.encode_conversation(
        conversation_of(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            input_modalities=api.service.card.input_modalities,
        )
    )


async def _detokenize(api: Api, request: Request) -> Response:
    body = await api.read(request, _detokenize_decoder)
    check_model(body.model, api.service.card)
    tokenizer = api.service.tokenizer
    if any(not 0 <= i < tokenizer.vocab_size for i in body.tokens):
        raise invalid("tokens", f"must be token ids from 0 to {tokenizer.vocab_size - 1}")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(Detokenized(text))
