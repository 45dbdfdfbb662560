"""lm-eval's generation, through both endpoints, with a task made up here: its answers are scored, all of them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TASK = """
task: garden
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 24, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
NUM_QUESTIONS = 6

with tempfile.TemporaryDirectory() as place:
    data = Path(place) / "garden.jsonl"
    lines = [{"question": f"What is {number} and 1?", "answer": str(number + 1)} for number in range(NUM_QUESTIONS)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (Path(place) / "garden.yaml").write_text(TASK.format(data=data))
    url = f"{os.environ['BASE_URL']}/v1"
    for kind, path, options in (
        ("local-chat-completions", "chat/completions", ["--apply_chat_template"]),
        ("local-completions", "completions", []),
    ):
        given = f"model=demo,base_url={url}/{path},num_concurrent=2,max_retries=1,tokenizer_backend=None"
        command = [str(Path(sys.executable).with_name("lm-eval")), "run", "--model", kind, "--model_args", given]
        command += ["--tasks", "garden", "--include_path", place, "--output_path", f"{place}/{kind}", *options]
        variables = {**os.environ, "HOME": place, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        (result,) = (json.loads(file.read_text()) for file in Path(place).glob(f"{kind}/**/results_*.json"))
        assert result["n-samples"]["garden"]["effective"] == NUM_QUESTIONS, result
