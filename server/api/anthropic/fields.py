"""How every field of the Messages API's bodies is treated, and fields of other APIs with the same purpose.

Tests compare the tables with the types of the bodies, the `anthropic` package and docs/api.md.
"""

from server.api.dialect import Rules, honoured, no_effect, refused

IN_PROMPT: Rules = {
    **honoured("model messages system tools tool_choice thinking output_config output_format cache_control"),
    **no_effect("the turn before is found by what it holds", "diagnostics"),
    **no_effect("it only says who asks and who pays", "user_profile_id workspace_id billing_policy"),
    **no_effect(
        "it only says where and how fast a request runs, and there is one engine",
        "service_tier speed inference_geo fallbacks fallback_credit_token",
    ),
    **no_effect("what is in a beta there is either served here or not", "betas anthropic_beta anthropic_version"),
    **no_effect("nothing is removed from a conversation by the server", "compaction"),
    **refused(
        "tools run where the client runs, and none on the server",
        mcp_servers=([],),
        container=(),
    ),
    **refused("a request holds its whole conversation", thread=(), previous_response_id=(), conversation=()),
    **refused("the prompt is made of system, messages and tools only", prompt=(), input=(), instructions=("",)),
    **refused(
        "its newer names are tools and tool_choice",
        functions=([],),
        function_call=("none",),
    ),
    **refused("its name here is output_config.effort", reasoning=({},), reasoning_effort=()),
    **refused("its name here is output_config.format", response_format=()),
}
"""Fields of both endpoints."""

IN_MESSAGES: Rules = {
    **IN_PROMPT,
    **honoured(
        "max_tokens stream stop_sequences temperature top_p top_k metadata session_id cache_salt context_management"
    ),
    **refused(
        "its name here is max_tokens",
        max_completion_tokens=(),
        max_output_tokens=(),
        max_new_tokens=(),
        max_tokens_to_sample=(),
        n_predict=(),
    ),
    **refused("its name here is stop_sequences", stop=([],)),
    **refused(
        "this API samples by temperature, top_p and top_k only; /v1/chat/completions has more",
        min_p=(0,),
        seed=(-1,),
        repetition_penalty=(1,),
        repeat_penalty=(1,),
        presence_penalty=(0,),
        frequency_penalty=(0,),
        logit_bias=({},),
        ignore_eos=(False,),
    ),
    **refused("a request has one answer", n=(1,)),
    **refused(
        "answers hold text, without data on single tokens",
        logprobs=(False,),
        top_logprobs=(0,),
    ),
    **refused("this API has no field for it; /v1/chat/completions has", cache_prompt=(True,), priority=(0,)),
}
"""Fields of `POST /v1/messages`."""

IN_COUNT: Rules = {
    **IN_PROMPT,
    **no_effect(
        "no answer is given",
        "max_tokens stream stop_sequences temperature top_p top_k metadata session_id cache_salt context_management",
    ),
}
"""Fields of `POST /v1/messages/count_tokens`."""
