"""Calls as a list in Python: `[f(a=1), g(b="x")]`, as Llama 3.2 and 4 and others write them. All of an answer."""

import ast
import re
from typing import Any

from models.output.tool_formats.bare import BareFormat

_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(.*)?)?", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _may_be_call(text: str) -> bool:
    return not text or _BEGINNING.fullmatch(text) is not None


def _parse(text: str, tools: Any) -> list[dict[str, Any]]:
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return [_call(node) for node in tree.elts]


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call with named arguments only")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _value(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


class _JsonNames(ast.NodeTransformer):
    """Models write the words of JSON where Python has its own."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


PYTHONIC = BareFormat(
    _may_be_call,
    _parse,
    r"\[\s*[A-Za-z_][\w.]*\s*\(",
    frames=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
)
