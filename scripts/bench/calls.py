"""What reading calls costs: CPU time a character, and the longest silence of a stream, by format.

Usage: python -m scripts.bench.calls

A file of 50 000 characters of code is written as a call's text, given to the reader in pieces of four characters.
"""

import time
from collections.abc import Mapping

from models.output.call_formats import CODER, GEMMA4, GLM, HERMES, KIMI_K2, LFM2, MINIMAX, CallFormat
from models.output.call_reader import CallReader
from models.output.call_values import json_text
from models.output.pieces import ToolArguments

CODE = "def f(x):\n    if x < 3 and y > \"a\":\n        return {'k': [1, 2]}\n    # </p> <b> \\d\n"
PIECE_CHARACTERS = 4
SIZE = 50_000
ROUNDS = 5
STRINGS = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "write_file", "parameters": STRINGS}}]


def calls(content: str) -> Mapping[CallFormat, str]:
    """One call in several formats."""
    quoted, python = json_text(content), repr(content)
    return {
        HERMES: f'<tool_call>\n{{"name": "write_file", "arguments": {{"content": {quoted}}}}}\n</tool_call>',
        CODER: f"<tool_call>\n<function=write_file>\n<parameter=content>\n{content}\n</parameter>\n</function>\n"
        "</tool_call>",
        GLM: f"<tool_call>write_file<arg_key>content</arg_key><arg_value>{content}</arg_value></tool_call>",
        MINIMAX: f'<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="content">{content}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        GEMMA4: f'<|tool_call>call:write_file{{content:<|"|>{content}<|"|>}}<tool_call|>',
        LFM2: f"<|tool_call_start|>[write_file(content={python})]<|tool_call_end|>",
        KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0<|tool_call_argument_begin|>"
        f'{{"content": {quoted}}}<|tool_call_end|><|tool_calls_section_end|>',
    }


def read(call_format: CallFormat, text: str) -> tuple[float, int]:
    """Microseconds of CPU a character, and the most pieces in a row without arguments once they have begun."""
    reader, silent, longest, begun = CallReader(call_format, TOOLS), 0, 0, False
    start = time.process_time()
    for place in range(0, len(text), PIECE_CHARACTERS):
        has_come = any(
            isinstance(piece, ToolArguments) for piece in reader.feed(text[place : place + PIECE_CHARACTERS])
        )
        begun, silent = begun or has_come, 0 if has_come else silent + 1
        longest = max(longest, silent) if begun else 0
    reader.finish(is_complete=True)
    assert reader.made_calls, f"{call_format.name}: the call was not read"
    return (time.process_time() - start) / len(text) * 1e6, longest


def main() -> None:
    """Prints a table."""
    print("| format | µs a character, best and worst of five | longest silence, pieces |\n|---|---|---|")
    for call_format, text in calls((CODE * (SIZE // len(CODE) + 1))[:SIZE]).items():
        read(call_format, text)
        figures = [read(call_format, text) for _ in range(ROUNDS)]
        costs, silent = sorted(cost for cost, _ in figures), max(silent for _, silent in figures)
        print(f"| {call_format.name} | {costs[0]:.2f}, {costs[-1]:.2f} | {silent} |")


if __name__ == "__main__":
    main()
