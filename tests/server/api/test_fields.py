"""No field that another server knows is ignored: it is honoured, refused in words, or changes nothing."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.inference.sampling_params import SamplingParams
from server.api.generation import IN_TEXT, GenerationBody
from server.api.openai.api import IN_CHAT_PRIME, IN_TEXT_PRIME
from server.api.openai.chat import IN_CHAT, ChatBody
from server.api.openai.generate import CompletionBody
from server.app.config import ServerConfig
from server.engine.request import LOOP_GUARD, FinishReason, LoopRule
from tests.support.apps import create_app
from tests.support.docs import Page, fields
from tests.support.fake_engine import FakeEngine, Script, fake_model

JSON = {"Content-Type": "application/json"}

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TABLES = {CHAT: IN_CHAT, TEXT: IN_TEXT}
BODIES: Mapping[str, type[GenerationBody]] = {CHAT: ChatBody, TEXT: CompletionBody}

# What the request schemas of other servers hold beyond OpenAI's fields.
VLLM = """
    top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words use_beam_search best_of echo
    add_special_tokens structured_outputs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern structural_tag priority request_id session_id
    logits_processors return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    stream_interval thinking_token_budget include_reasoning mm_processor_kwargs media_io_kwargs prompt_embeds
    routed_experts_prompt_start
"""
SGLANG = """
    top_k min_p min_tokens json_schema regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
    ignore_eos skip_special_tokens lora_path session_id session_params custom_params custom_logit_processor
    images_config return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_token_ids return_prompt_token_ids return_meta_info bootstrap_host
    bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key
    cache_salt ngram_corpus_id priority custom_labels task separate_reasoning stream_reasoning
    max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids reasoning
"""
LLAMA_CPP = """
    n_predict n_indent n_keep n_discard n_cmpl n_cache_reuse temperature dynatemp_range dynatemp_exponent
    top_k top_p min_p top_n_sigma typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability
    xtc_threshold mirostat mirostat_tau mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs
    min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers timings_per_token return_progress
    sse_ping_interval post_sampling_probs response_fields lora reasoning_format reasoning_budget_tokens
    thinking_budget_tokens speculative.n_max speculative.n_min speculative.p_min speculative.type
"""
OLLAMA = "format options keep_alive think template system context raw images suffix num_predict reasoning"
LM_STUDIO = "top_k repeat_penalty seed ttl draft_model"
TGI = """
    inputs parameters best_of do_sample max_new_tokens repetition_penalty frequency_penalty return_full_text
    seed stop top_k top_p truncate typical_p watermark details decoder_input_details top_n_tokens grammar
    adapter_id tool_prompt guideline
"""
MLX_LM = """
    max_tokens repetition_context_size presence_context_size frequency_context_size xtc_probability
    xtc_threshold adapters draft_model num_draft_tokens role_mapping
"""
OTHERS = "reasoning thinking top_a transforms plugins prompt_mode safe_prompt random_seed enable_search extra_body"
ELSEWHERE = {*f"{VLLM} {SGLANG} {LLAMA_CPP} {OLLAMA} {LM_STUDIO} {TGI} {MLX_LM} {OTHERS}".split()}


def post(client: TestClient, path: str, **fields: Any) -> Any:
    prompt: Mapping[str, Any] = (
        {"prompt": "Hi"} if path == TEXT else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    return client.post(path, content=json.dumps({**prompt, **fields}), headers=JSON)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_field_that_another_server_knows_is_read_refused_or_documented(path: str) -> None:
    ignored = Page("api.md").without_effect("Fields of both completion endpoints")
    assert ELSEWHERE - TABLES[path].keys() - fields(BODIES[path]) - ignored == set()


REPEATING = {"repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("recommended", "asked", "window"),
    [
        (1.0, {**REPEATING, "repetition_context_size": 64}, 64),
        (1.1, {"repetition_context_size": 64}, 64),
        (1.0, {"presence_penalty": 0.5, "presence_context_size": 20, "repetition_context_size": 64}, 20),
        (1.0, {**REPEATING, "frequency_penalty": 1, "repetition_context_size": 9, "frequency_context_size": 9}, 9),
        (1.0, {**REPEATING, "repetition_context_size": 20.0, "repeat_last_n": 20}, 20),
        (1.0, {"repetition_context_size": 20, "presence_context_size": 21}, None),
    ],
)
def test_mlx_lms_windows_of_penalties_in_force_are_the_window(
    recommended: float, asked: dict[str, Any], window: int | None
) -> None:
    engine, model = FakeEngine(), fake_model(sampling=SamplingParams(repetition_penalty=recommended))
    assert post(TestClient(create_app(engine, model, ServerConfig())), CHAT, **asked).status_code == 200
    assert engine.requests[0].sampling.repeat_last_n == window


@pytest.mark.parametrize("other", [{"repeat_last_n": 20}, {"presence_penalty": 1, "presence_context_size": 20}])
def test_several_windows_are_refused(client: TestClient, other: dict[str, Any]) -> None:
    answer = post(client, CHAT, **REPEATING, repetition_context_size=64, **other)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert "context_size" in answer.json()["error"]["param"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_ollamas_options_are_taken_and_the_bodys_own_fields_come_first(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    options = {
        "num_ctx": 65536, "num_predict": 7, "temperature": 0.5, "seed": -3, "repeat_penalty": 1.2, "stop": ["x"],
    }  # fmt: skip
    assert post(client, path, options={"num_ctx": 65536}).status_code == 200
    assert post(client, path, options=options, temperature=0).status_code == 200
    assert post(client, path, options={"num_predict": -1}, max_tokens=3, stop="y").status_code == 200
    plain, told, limited = engine.requests
    assert plain.sampling == SamplingParams()
    assert (told.max_tokens, told.stop, told.sampling.temperature) == (7, ("x",), 0)
    assert (told.sampling.repetition_penalty, told.sampling.seed) == (1.2, None)
    assert (limited.max_tokens, limited.stop) == (3, ("y",))
    wrong = post(client, path, options={"temperature": "hot"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "options.temperature")


@pytest.mark.parametrize(
    ("of_endpoint", "of_prime", "more"), [(IN_CHAT, IN_CHAT_PRIME, set()), (IN_TEXT, IN_TEXT_PRIME, {"echo"})]
)
def test_a_prime_refuses_what_its_endpoint_refuses(
    of_endpoint: Mapping[str, Any], of_prime: Mapping[str, Any], more: set[str]
) -> None:
    assert of_prime.keys() - of_endpoint.keys() == {"stream", "cache_prompt", "n"} | more
    assert of_endpoint.items() <= of_prime.items()


DETECTION = {"max_pattern_size": 20, "min_pattern_size": 2, "min_count": 4}


@pytest.mark.parametrize(
    ("guards", "asked", "rule"),
    [
        (False, None, None),
        (True, None, LOOP_GUARD),
        (True, DETECTION, LoopRule(20, 2, 4)),
        (False, {"max_pattern_size": 8, "min_count": 2}, LoopRule(8, 0, 2)),
        (True, {"max_pattern_size": 0}, None),
        (True, {}, None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_vllms_repetition_detection_comes_before_the_guard(
    path: str, guards: bool, asked: dict[str, Any] | None, rule: LoopRule | None
) -> None:
    engine = FakeEngine()
    client = TestClient(create_app(engine, fake_model(), ServerConfig(loop_guard=guards)))
    assert post(client, path, repetition_detection=asked).status_code == 200
    assert engine.requests[0].loops == rule


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_pattern_size": 4},
        {"max_pattern_size": 4, "min_count": 1},
        {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2},
        {"max_pattern_size": -1},
        {"max_pattern_size": 10**9, "min_count": 2},
        {"max_pattern_size": "4", "min_count": 2},
        True,
    ],
)
def test_a_repetition_that_vllm_refuses_is_refused(client: TestClient, wrong: Any) -> None:
    answer = post(client, CHAT, repetition_detection=wrong)
    assert (answer.status_code, answer.json()["error"]["param"].partition(".")[0]) == (400, "repetition_detection")


MESSAGE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}


@pytest.mark.parametrize(
    ("path", "body", "ends"),
    [
        (CHAT, {**MESSAGE, "repetition_detection": DETECTION}, ('"repetition"', '"repetition_detected"')),
        (CHAT, MESSAGE, ('"length"', '"repetition_detected"')),
        (TEXT, {"prompt": "Hi"}, ('"length"', '"repetition_detected"')),
        ("/v1/messages", MESSAGE, ('"max_tokens"',)),
        ("/v1/responses", {"input": "Hi"}, ('"incomplete"', '"max_output_tokens"')),
        ("/api/chat", MESSAGE, ('"length"',)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_loop_ends_says_so_in_its_dialects_own_values(
    path: str, body: dict[str, Any], ends: tuple[str, ...], stream: bool
) -> None:
    engine = FakeEngine(Script(("round ", "round "), FinishReason.LENGTH, is_loop=True))
    client = TestClient(create_app(engine, fake_model(), ServerConfig(loop_guard=True)))
    answer = client.post(path, content=json.dumps({"model": "tiny", **body, "stream": stream}), headers=JSON)
    assert answer.status_code == 200, answer.text
    assert all(end in answer.text for end in ends)
    assert "context_window" not in answer.text
