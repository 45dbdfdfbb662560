"""How every field of OpenAI's endpoints is treated, including fields that only similar servers know.

Tests compare the tables with the types of the bodies, the schemas of other servers and docs/api.md.
"""

from server.api.dialect import Rules, honoured, no_effect, refused

_NO_TOKEN_DATA = "answers hold text, without data on single tokens or on the model's inner state"
_NO_TEMPLATE = "a plain completion has no messages, tools or template; send it to /v1/chat/completions"

IN_BOTH: Rules = {
    **honoured(
        """
        model stream stream_options n max_tokens max_completion_tokens max_new_tokens n_predict temperature top_p
        top_k min_p typical_p top_n_sigma xtc_probability xtc_threshold
        seed repetition_penalty repeat_penalty presence_penalty frequency_penalty repeat_last_n
        repetition_context_size presence_context_size frequency_context_size
        dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
        logit_bias allowed_token_ids bad_words stop
        stop_token_ids include_stop_str_in_output no_stop_trim min_tokens min_new_tokens
        ignore_eos response_format structured_outputs json_schema guided_json format guided_regex regex guided_choice
        guided_grammar grammar ebnf
        return_token_ids return_tokens_as_token_ids
        session_id cache_prompt cache_salt prompt_cache_key prompt_cache_retention priority service_tier metadata
        store options
        """
    ),
    **no_effect("it only says who asks", "user safety_identifier", is_read=True),
    **no_effect("it only names the request or the session", "request_id rid previous_response_id conversation"),
    **no_effect("it only labels the request", "custom_labels"),
    **no_effect("how long models stay loaded is --keep-alive's to say", "keep_alive ttl"),
    **no_effect("it could only save time", "draft_model num_draft_tokens ngram_corpus_id prompt_cache_options"),
    **no_effect("special tokens are never part of the answer", "spaces_between_special_tokens"),
    **no_effect("slots are chosen by the tokens", "id_slot"),
    **no_effect("tokens are never shifted or dropped from the context", "n_keep n_discard n_cache_reuse"),
    **no_effect(
        "it only says where a request runs, and there is one engine",
        """
        bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank
        kv_transfer_params ec_transfer_params
        """,
    ),
    **no_effect(
        "it only says how often progress is told",
        "timings_per_token return_progress stream_interval sse_ping_interval",
    ),
    **no_effect(
        "it belongs to a field that is refused",
        """
        mirostat_tau mirostat_eta dynatemp_exponent truncation_side custom_params
        routed_experts_start_len routed_experts_prompt_start return_mm_kwargs
        """,
    ),
    **no_effect(
        "prompts are text only",
        """
        mm_processor_kwargs media_io_kwargs images_config max_dynamic_patch min_dynamic_patch use_audio_in_video
        """,
    ),
    **refused(
        "answers are bound by a JSON schema, a pattern, a list of choices or a grammar only",
        structural_tag=(),
    ),
    **no_effect(
        "JSON is written on one line here, whatever binds it", "guided_decoding_backend guided_whitespace_pattern"
    ),
    **refused(
        "all of the n answers are given, each sampled token by token",
        best_of=(1,),
        use_beam_search=(False,),
        length_penalty=(1,),
        do_sample=(True,),
    ),
    **refused(
        "there is no such sampler here",
        top_a=(0,),
        tfs_z=(1,),
        mirostat=(0,),
        dynatemp_range=(0,),
        min_keep=(0,),
        samplers=(),
        no_repeat_ngram_size=(0,),
        watermark=(False,),
        watermarking=(False,),
        logits_processors=([],),
        custom_logit_processor=(),
    ),
    **refused(
        "an answer ends where the model ends it, at a text in stop, at a token, or at max_tokens",
        stop_regex=("", []),
        n_indent=(0,),
        t_max_predict_ms=(0, -1),
        repetition_detection=(),
    ),
    **refused("special tokens are never part of the answer", skip_special_tokens=(True,)),
    **refused(
        "prompts are never cut; what is too long is answered with an error",
        truncate_prompt_tokens=(),
        truncate=(),
        truncation=("disabled",),
        transforms=([],),
    ),
    **refused(
        "the prompt is made of messages and tools, or of prompt, and of nothing else",
        input=(),
        input_ids=(),
        inputs=(),
        prompt_embeds=(),
        system=("",),
        instructions=("",),
        template=("",),
        raw=(False,),
        context=([],),
        images=([],),
        role_mapping=(),
        tool_prompt=("",),
        guideline=("",),
        prompt_mode=(),
        safe_prompt=(False,),
        task=(),
        session_params=({},),
        suffix=("",),
    ),
    **refused("its name here is n", n_cmpl=(1,)),
    **refused("its name here is max_tokens", num_predict=(), max_output_tokens=()),
    **refused("its name here is seed", random_seed=()),
    **refused("its name here is cache_salt", extra_key=()),
    **refused(
        "fields stand in the body itself",
        parameters=({},),
        sampling_params=({},),
        extra_body=({},),
        vllm_xargs=({},),
    ),
    **refused(
        _NO_TOKEN_DATA,
        n_probs=(0,),
        post_sampling_probs=(False,),
        prompt_logprobs=(0,),
        logprob_token_ids=(),
        top_n_tokens=(0,),
        details=(False,),
        decoder_input_details=(False,),
        return_hidden_states=(False,),
        return_routed_experts=(False,),
        return_prompt_token_ids=(False,),
        return_tokens=(False,),
        return_token_offsets=(False,),
    ),
    **refused(
        "answers have the same fields for everybody, and do not repeat the prompt",
        return_full_text=(False,),
        return_prompt_text=(False,),
        return_meta_info=(False,),
        return_cached_tokens_details=(False,),
        response_fields=([],),
    ),
    **refused(
        "the model runs as it was loaded, without adapters",
        lora=([],),
        lora_path=(),
        adapter_id=(),
        adapters=(),
    ),
    **refused(
        "nothing is looked up or judged on the side",
        moderation=(),
        plugins=([],),
        enable_search=(False,),
        web_search_options=(),
    ),
}
"""Fields of both completion endpoints."""

_OF_VECTORS: Rules = {
    **no_effect("it only says who asks", "user"),
    **no_effect("vectors depend on their text only", "session_id cache_salt priority"),
    **refused(
        "a text that is too long is answered with an error, never cut",
        truncate_prompt_tokens=(-1,),
        max_tokens_per_doc=(),
        max_chunks_per_doc=(),
    ),
}

IN_EMBEDDINGS: Rules = {
    **_OF_VECTORS,
    **honoured("model input encoding_format dimensions"),
    **refused("texts have the tokens that the tokenizer puts around them", add_special_tokens=(True,)),
    **refused("a vector has the length 1", normalize=(True,), embd_normalize=(2,)),
    **refused("texts are embedded as they are, without a template", messages=([],), task=(), input_type=()),
}
"""Fields of `POST /v1/embeddings`."""

IN_RERANK: Rules = {
    **_OF_VECTORS,
    **honoured("model query documents top_n return_documents instruction"),
    **refused("a document is a text, or an object with a text", rank_fields=([], ["text"])),
}
"""Fields of `POST /v1/rerank`."""

IN_CHAT: Rules = {
    **IN_BOTH,
    **honoured(
        """
        messages tools tool_choice continue_final_message add_generation_prompt chat_template_kwargs
        enable_thinking reasoning_effort reasoning thinking think max_thinking_tokens thinking_budget
        thinking_budget_tokens thinking_token_budget reasoning_budget reasoning_budget_tokens
        """
    ),
    **refused(
        "what the model thinks is returned apart from what it says",
        include_reasoning=(True,),
        separate_reasoning=(True,),
        stream_reasoning=(True,),
        reasoning_format=("auto", "deepseek", "parsed"),
    ),
    **honoured("parallel_tool_calls"),
    **no_effect("the model decides", "verbosity", is_read=True),
    **no_effect("it could only save time", "prediction", is_read=True),
    **honoured("logprobs top_logprobs"),
    **refused("its newer names are tools and tool_choice", functions=([],), function_call=("none",)),
    **refused("prompts and answers are text only", modalities=(["text"],), audio=()),
    **refused(
        "messages become the prompt by the model's own template, which ends with the beginning of an answer",
        add_special_tokens=(False,),
        chat_template=("",),
        documents=([],),
        prompt=(),
    ),
    **refused("an answer does not repeat the conversation", echo=(False,)),
    **refused("calls of tools are always told apart from text", parse_tool_calls=(True,)),
}
"""Fields of `POST /v1/chat/completions`."""

IN_TEXT: Rules = {
    **IN_BOTH,
    **honoured("prompt echo"),
    **refused(
        "a plain completion has no template that could be told to think; send it to /v1/chat/completions",
        think=(),
        thinking=({},),
        max_thinking_tokens=(-1,),
        thinking_budget=(-1,),
        thinking_budget_tokens=(-1,),
        thinking_token_budget=(-1,),
        reasoning=({},),
        reasoning_budget=(-1,),
        reasoning_budget_tokens=(-1,),
    ),
    **refused(
        "what the model thinks is part of a completion's text",
        include_reasoning=(True,),
        separate_reasoning=(False,),
        stream_reasoning=(True,),
        reasoning_format=("none", "auto"),
    ),
    **honoured("logprobs"),
    **refused("a prompt always begins with the model's first token, where it has one", add_special_tokens=(True,)),
    **refused(
        _NO_TEMPLATE,
        messages=([],),
        tools=([],),
        functions=([],),
        documents=([],),
        chat_template=("",),
        continue_final_message=(False,),
    ),
}
"""Fields of `POST /v1/completions`."""

_PRIME_ONLY = refused(
    "priming is there to keep one prompt, and has no text to stream",
    cache_prompt=(True,),
    stream=(False,),
    n=(1,),
)
IN_CHAT_PRIME: Rules = {**IN_CHAT, **_PRIME_ONLY}
IN_TEXT_PRIME: Rules = {
    **IN_TEXT,
    **_PRIME_ONLY,
    **refused("priming has no answer that could repeat the prompt", echo=(False,)),
}
"""Fields of `POST /v1/cache/prime`, with messages or a prompt."""

IN_MESSAGE: Rules = {
    **honoured("role content name tool_calls tool_call_id reasoning_content reasoning refusal cache_control prefix"),
    **honoured("audio function_call"),
    **refused("prompts are text only", images=([],)),
    **refused("its name here is reasoning_content", thinking=("",)),
    **refused("tools stand in the body, not in a message", tools=([],)),
}
"""Fields of one message of a conversation."""
