"""Health, readiness, stages, models, tokenize, cache reset, the page, and the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts.errors import EngineError, TooManyRequests
from contracts.timings import Times
from stages.service import StageHealth
from tests.api.fakes import CONTEXT, START, Script, ScriptedService
from tests.api.serving import client, post, user
from tests.api.test_chat import with_client


def get(service: ScriptedService, path: str) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client(service) as http:
            return await http.get(path)

    return asyncio.run(run())


# --- health -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [("ready", 200, 200), ("starting", 200, 503), ("failed", 503, 503), ("stopped", 503, 503)],
)
def test_health_is_per_stage(state: str, health: int, ready: int) -> None:
    service = ScriptedService()
    service.stages = (StageHealth("encoder", "ready"), StageHealth("thinker", state, "why"))
    response = get(service, "/health")
    assert response.status_code == health
    assert response.json()["stages"] == [
        {"stage": "encoder", "state": "ready", "detail": ""},
        {"stage": "thinker", "state": state, "detail": "why"},
    ]
    if health == 503:
        assert response.json()["status"] == "unhealthy"
        assert response.json()["error"]["message"] == f"thinker {state}: why"
        assert "encoder" not in response.json()["error"]["message"]
    assert get(service, "/ready").status_code == ready


def test_stages_show_their_values() -> None:
    service = ScriptedService()
    service.values = {"thinker": {"num_requests_running": 2.0}}
    body = get(service, "/stages").json()
    assert [s["values"] for s in body["stages"]] == [{}, {"num_requests_running": 2.0}]
    assert body["workers"] == [
        {"name": "w", "stages": ["lm"], "pid": 7, "devices": ["cpu"], "state": "ready", "restarts": 2}
    ]


def test_cache_reset() -> None:
    service = ScriptedService()
    assert post(service, "/cache/reset", b"").status_code == 200
    assert service.num_resets == 1


def test_page_is_self_contained() -> None:
    page = get(ScriptedService(), "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "https://" not in page.text
    assert "http://" not in page.text
    assert "v1/chat/completions" in page.text


# --- models and tokens --------------------------------------------------------------------------------------
def test_models() -> None:
    async def use(sdk: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
        return [m async for m in sdk.models.list()], await sdk.models.retrieve("toy-alias")

    listed, one = with_client(ScriptedService(), use)
    assert [m.id for m in listed] == ["toy", "toy-alias"]
    assert one.max_model_len == CONTEXT
    assert one.input_modalities == ["text", "image"]


def test_tokenize_and_back() -> None:
    service = ScriptedService()
    found = post(service, "/tokenize", {"prompt": "né", "return_token_strs": True}).json()
    assert found == {
        "count": 4,
        "max_model_len": CONTEXT,
        "tokens": [START, 110, 195, 169],
        "token_strs": ["<|start|>", "n", "\ufffd", "\ufffd"],
    }
    bare = post(service, "/tokenize", {"prompt": "né", "add_special_tokens": False}).json()
    assert bare["tokens"] == [110, 195, 169]
    assert post(service, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "<|start|>né"}


def test_tokenize_messages_as_chat_does() -> None:
    service = ScriptedService()
    found = post(service, "/tokenize", user("hi")).json()
    usage = post(service, "/v1/chat/completions", user("hi")).json()["usage"]
    assert found["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **user("a")}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
    ],
)
def test_bad_token_requests(path: str, body: dict[str, Any], param: str) -> None:
    response = post(ScriptedService(), path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# --- metrics ------------------------------------------------------------------------------------------------
def scrape(service: ScriptedService, *bodies: dict[str, Any]) -> dict[str, float]:
    """Samples after the requests, by `name{label=value,...}` without model_name."""

    async def run() -> str:
        async with client(service) as http:
            for body in bodies:
                await http.post("/v1/chat/completions", json=body)
            return (await http.get("/metrics")).text

    found: dict[str, float] = {}
    text = asyncio.run(run())
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "a family appears twice"
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "toy"
            inside = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
    return found


def test_series_exist_before_the_first_request() -> None:
    found = scrape(ScriptedService())
    for name in (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        *(f"vllm:request_success_total{{finished_reason={r}}}" for r in ("stop", "length", "abort", "error")),
        *(f"vllm:{h}_count" for h in ("time_to_first_token_seconds", "inter_token_latency_seconds")),
        *(
            f"vllm:{h}_count"
            for h in ("request_time_per_output_token_seconds", "e2e_request_latency_seconds")
        ),
        *(f"vllm:{h}_count" for h in ("request_prompt_tokens", "request_generation_tokens")),
    ):
        assert found[name] == 0, name


def test_counts_of_requests_and_tokens() -> None:
    service = ScriptedService(
        Script(),  # 7 tokens with the end token
        Script(),
        Script(refusal=TooManyRequests("full")),
        Script(fail_at_step=2, error=EngineError("no luck")),
    )
    found = scrape(service, user("hi"), {**user("hi"), "max_tokens": 3, "stream": True}, user("a"), user("b"))
    assert found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert found["vllm:request_success_total{finished_reason=length}"] == 1
    assert found["vllm:request_success_total{finished_reason=error}"] == 1
    assert found["vllm:request_success_total{finished_reason=abort}"] == 0
    assert found["omnistage:api_requests_rejected_total{status=429}"] == 1
    assert found["vllm:generation_tokens_total"] == 7 + 3 + 2
    num_prompt = [len(service._prompt(f.request)[0]) for f in service.flows.values()]
    assert found["vllm:prompt_tokens_total"] == num_prompt[0] + num_prompt[1] + num_prompt[3]
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 6 + 2 + 1
    assert found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:request_generation_tokens_sum"] == 10
    assert found["omnistage:api_open_requests"] == 0


def test_times_of_stages_and_edges_become_histograms() -> None:
    service = ScriptedService()
    queued, delivered = Times(), Times()
    for seconds in (0.0001, 0.02, 0.02, 99.0):
        queued.add(seconds)
    delivered.add(0.3)
    edge = "vision->thinker"
    service.times = (
        queued.as_timing("stage_queue_seconds", "thinker"),
        delivered.as_timing("edge_delivery_seconds", edge),
    )
    found = scrape(service)
    buckets = {le: found[f"omnistage:stage_queue_seconds_bucket{{le={le},stage=thinker}}"] for le in LE}
    assert buckets == {"0.0001": 1, "0.01": 1, "0.025": 3, "30.0": 3, "+Inf": 4}
    assert found["omnistage:stage_queue_seconds_count{stage=thinker}"] == 4
    assert found["omnistage:stage_queue_seconds_sum{stage=thinker}"] == pytest.approx(99.0401)
    assert found[f"omnistage:edge_delivery_seconds_bucket{{le=0.25,stage={edge}}}"] == 0
    assert found[f"omnistage:edge_delivery_seconds_bucket{{le=0.5,stage={edge}}}"] == 1


LE = ("0.0001", "0.01", "0.025", "30.0", "+Inf")


def test_stage_values_become_metrics() -> None:
    service = ScriptedService()
    service.values = {
        "thinker": {
            "num_requests_running": 2,
            "kv_cache_usage_perc": 0.25,
            "prefix_cache_hits_total": 5,
            "num_preemptions_total": 1,
            "steps_total": 9,
        },
        "talker": {"num_requests_running": 1, "kv_cache_usage_perc": 0.5, "prefix_cache_hits_total": 2},
        "encoder": {"cache_bytes": 1024},
        "front": {"open_requests": 3, "requests_rejected_total": 1},
    }
    found = scrape(service)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["vllm:prefix_cache_hits_total"] == 7
    assert found["vllm:num_preemptions_total"] == 1
    assert found["omnistage:steps_total{stage=thinker}"] == 9
    assert found["omnistage:cache_bytes{stage=encoder}"] == 1024
