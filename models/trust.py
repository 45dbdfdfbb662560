"""A model folder may hold code of its own. It is never imported or run, and there is no setting that allows it.

Many folders name such code (`auto_map`, which transformers reads) although mlx-lm knows the model and its tokenizer
is a file: these load, and the code is not looked at. A model that cannot do without is refused in one sentence. Knows
file formats only, neither mlx-lm nor transformers.
"""

import json
from pathlib import Path
from typing import Any

from models.errors import ModelBroken

_NEVER_RUN = "which mlx-serve never runs"


def check_model_code(config: dict[str, Any], name: str) -> None:
    """Raises ModelBroken for a configuration that has the model built by a file of the folder."""
    if config.get("model_file") is not None:
        raise ModelBroken(
            f"{name}: config.json has the model built by code of the folder ({_shown(config['model_file'])}), "
            f"{_NEVER_RUN}; choose a conversion without model_file"
        )


def hint_at_own_code(config: dict[str, Any]) -> str:
    """Returns what to add for an architecture that is unknown, where the folder brings code for it; maybe empty."""
    code = _code_in(config.get("auto_map"), ("AutoModelForCausalLM", "AutoModel", "AutoConfig"))
    if code is None:
        return ""
    return f", and the folder's own code for it ({code}) is never run; choose a model of a type that mlx-lm knows"


def check_tokenizer_code(folder: Path, name: str) -> None:
    """Raises ModelBroken for a tokenizer that is code, with no `tokenizer.json` in its place.

    What else transformers would take then may cut texts otherwise than the model has learned it.
    """
    if (folder / "tokenizer.json").is_file():
        return
    code = tokenizer_code(folder)
    if code is not None:
        raise ModelBroken(refusal_of_tokenizer(name, code))


def tokenizer_code(folder: Path) -> str | None:
    """Returns the class that a folder names for its tokenizer, such as `tokenization_x.XTokenizer`; maybe None."""
    for file in ("tokenizer_config.json", "config.json"):
        code = _code_in(_read_object(folder / file).get("auto_map"), ("AutoTokenizer",))
        if code is not None:
            return code
    return None


def refusal_of_tokenizer(name: str, code: str) -> str:
    """Returns why a tokenizer that needs `code` is not loaded."""
    return (
        f"{name}: its tokenizer is code of the folder ({code}), {_NEVER_RUN}; choose a conversion whose "
        "tokenizer.json says all, without auto_map in tokenizer_config.json"
    )


def _code_in(auto_map: Any, kinds: tuple[str, ...]) -> str | None:
    """Returns the first class that `auto_map` names for `kinds`; older folders give a tokenizer's as a list alone."""
    if isinstance(auto_map, list) and "AutoTokenizer" in kinds:
        auto_map = {"AutoTokenizer": auto_map}
    if not isinstance(auto_map, dict):
        return None
    for kind in kinds:
        named = auto_map.get(kind)
        found = [code for code in (named if isinstance(named, list) else [named]) if isinstance(code, str)]
        if found:
            return _shown(found[-1])
    return None


def _shown(code: Any, limit: int = 100) -> str:
    text = " ".join(str(code).split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
