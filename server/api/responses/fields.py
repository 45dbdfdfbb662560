"""How every field of the Responses API's bodies is treated, and fields of other APIs with the same purpose.

A field in no table is refused, as OpenAI refuses it. Tests compare the tables with the types of the bodies, the
`openai` package and docs/responses.md.
"""

from server.api.dialect import Rules, honoured, no_effect, refused

IN_INPUT: Rules = {
    **honoured("model input instructions previous_response_id conversation tools tool_choice reasoning text"),
    **no_effect("prompts are never cut; what is too long is answered with an error", "truncation", is_read=True),
    **honoured("parallel_tool_calls"),
    **no_effect("no model here has personalities", "personality"),
    **refused("prompts are not kept here; send instructions and input", prompt=()),
    **refused("its name here is input", messages=([],)),
}
"""Fields of both endpoints that take a prompt."""

IN_RESPONSES: Rules = {
    **IN_INPUT,
    **honoured(
        """
        stream stream_options max_output_tokens temperature top_p store include metadata service_tier
        prompt_cache_key prompt_cache_retention session_id cache_prompt cache_salt priority
        """
    ),
    **no_effect("it only says who asks", "user safety_identifier", is_read=True),
    **no_effect("no tools run on the server", "max_tool_calls", is_read=True),
    **no_effect("it only labels the request", "client_metadata"),
    **no_effect("it could only save time", "prompt_cache_options"),
    **no_effect("nothing is removed from a conversation by the server", "context_management"),
    **no_effect("it only says what a request may be used for", "access_programs"),
    **no_effect("prompts are text only", "image"),
    **refused("an answer is made while its client waits; send stream instead", background=(False,)),
    **no_effect("it belongs to a field that is refused", "background_options"),
    **refused("nothing is looked up or judged on the side", moderation=()),
    **refused("answers hold text, without data on single tokens", top_logprobs=(0,)),
    **refused("its name here is max_output_tokens", max_tokens=(), max_completion_tokens=()),
    **refused("its name here is text.format", response_format=()),
    **refused("its name here is reasoning.effort", reasoning_effort=()),
    **refused(
        "this API samples by temperature and top_p only; /v1/chat/completions has more",
        top_k=(0, -1),
        min_p=(0,),
        seed=(-1,),
        stop=([],),
        presence_penalty=(0,),
        frequency_penalty=(0,),
        repetition_penalty=(1,),
        logit_bias=({},),
        n=(1,),
    ),
}
"""Fields of `POST /v1/responses`."""

IN_COUNT: Rules = {
    **IN_INPUT,
    **no_effect(
        "no answer is given",
        " ".join(name for name in IN_RESPONSES if name not in IN_INPUT),
    ),
}
"""Fields of `POST /v1/responses/input_tokens`."""

IN_CONVERSATION: Rules = honoured("items metadata")
"""Fields of `POST /v1/conversations`."""
IN_UPDATE: Rules = honoured("metadata")
"""Fields of `POST /v1/conversations/{conversation_id}`."""
IN_ITEMS: Rules = honoured("items")
"""Fields of `POST /v1/conversations/{conversation_id}/items`."""
