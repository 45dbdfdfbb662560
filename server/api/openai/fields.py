"""The fields that OpenAI's endpoints refuse; most of them only similar servers know."""

from server.api.bodies import Rules, refused

IN_BOTH: Rules = refused("""
    answers are bound by a JSON schema, a pattern, a list of choices or a grammar only: structural_tag
    all of the n answers are given, each sampled token by token: best_of=1 use_beam_search=false length_penalty=1
        do_sample=true
    there is no such sampler here: samplers custom_logit_processor top_a=0 tfs_z=1 mirostat=0 dynatemp_range=0
        min_keep=0 no_repeat_ngram_size=0 watermark=false watermarking=false logits_processors=[]
    an answer ends where the model ends it, at a text in stop, at a token, or at max_tokens: stop_regex=""|[]
        n_indent=0 t_max_predict_ms=0|-1
    special tokens are never part of the answer: skip_special_tokens=true
    prompts are never cut; what is too long is answered with an error: truncate_prompt_tokens truncate
        truncation="disabled" transforms=[]
    the prompt is made of messages and tools, or of prompt, and of nothing else: input input_ids inputs prompt_embeds
        role_mapping prompt_mode task system="" instructions="" template="" raw=false context=[] images=[]
        tool_prompt="" guideline="" safe_prompt=false session_params={} suffix=""
    its name here is n: n_cmpl=1
    its name here is max_tokens: num_predict max_output_tokens
    its name here is seed: random_seed
    its name here is cache_salt: extra_key
    fields stand in the body itself: parameters={} sampling_params={} extra_body={} vllm_xargs={}
    answers hold text, without data on single tokens or on the model's inner state: logprob_token_ids n_probs=0
        post_sampling_probs=false prompt_logprobs=0 top_n_tokens=0 details=false decoder_input_details=false
        return_hidden_states=false return_routed_experts=false return_prompt_token_ids=false return_tokens=false
        return_token_offsets=false
    answers have the same fields for everybody, and do not repeat the prompt: return_full_text=false
        return_prompt_text=false return_meta_info=false return_cached_tokens_details=false response_fields=[]
    the model runs as it was loaded, without adapters: lora_path adapter_id adapters lora=[]
    nothing is looked up or judged on the side: moderation web_search_options plugins=[] enable_search=false
""")

IN_CHAT: Rules = IN_BOTH | refused("""
    what the model thinks is returned apart from what it says: include_reasoning=true separate_reasoning=true
        stream_reasoning=true reasoning_format="auto"|"deepseek"|"parsed"
    prompts and answers are text only: audio modalities=["text"]
    messages become the prompt by the model's own template, which ends with the beginning of an answer: prompt
        add_special_tokens=false chat_template="" documents=[]
    an answer does not repeat the conversation: echo=false
    calls of tools are always told apart from text: parse_tool_calls=true
""")

IN_TEXT: Rules = IN_BOTH | refused("""
    a plain completion has no template that could be told to think; send it to /v1/chat/completions: think
        thinking={} max_thinking_tokens=-1 thinking_budget=-1 thinking_budget_tokens=-1 thinking_token_budget=-1
        reasoning={} reasoning_budget=-1 reasoning_budget_tokens=-1
    what the model thinks is part of a completion's text: include_reasoning=true separate_reasoning=false
        stream_reasoning=true reasoning_format="none"|"auto"
    a prompt always begins with the model's first token, where it has one: add_special_tokens=true
    a plain completion has no messages, tools or template; send it to /v1/chat/completions: messages=[] tools=[]
        functions=[] documents=[] chat_template="" continue_final_message=false
""")

_PRIME = refused("priming is there to keep one prompt, and has no text to stream: cache_prompt=true stream=false n=1")
IN_CHAT_PRIME: Rules = IN_CHAT | _PRIME
IN_TEXT_PRIME: Rules = IN_TEXT | _PRIME | refused("priming has no answer that could repeat the prompt: echo=false")

IN_MESSAGE: Rules = refused("""
    prompts are text only: images=[]
    its name here is reasoning_content: thinking=""
    tools stand in the body, not in a message: tools=[]
""")
