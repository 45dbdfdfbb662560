"""An MCP server on standard input and output with 40 tools, each of which says what it was asked."""

import json
import sys
from typing import Any

AREAS = ("ledger", "mail", "calendar", "contacts", "invoices", "travel", "stock", "payroll")
ACTIONS = ("lookup", "create", "update", "delete", "report")


def tools() -> list[dict[str, Any]]:
    """Returns the tools as MCP lists them."""
    return [_tool(area, action) for area in AREAS for action in ACTIONS]


def _tool(area: str, action: str) -> dict[str, Any]:
    properties = {
        "id": {"type": "string", "description": f"Which entry of the {area} to {action}, as its list names it."},
        "fields": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Which of its fields; all by default.",
        },
        "dry_run": {"type": "boolean", "description": f"Only say what {action} would do, and change nothing."},
    }
    description = (
        f"Does {action} in the {area} of the office. Use it for one entry at a time, and report what came of it."
    )
    schema = {"type": "object", "properties": properties, "required": ["id"]}
    return {"name": f"{area}_{action}", "description": description, "inputSchema": schema}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the result of a request; None for a method that is not there."""
    match method:
        case "initialize":
            info = {"name": "office", "version": "1"}
            version = params.get("protocolVersion", "2025-06-18")
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "ping":
            return {}
        case "tools/list":
            return {"tools": tools()}
        case "tools/call":
            return {"content": [{"type": "text", "text": f"{params['name']}: {json.dumps(params.get('arguments'))}"}]}
    return None


def main() -> None:
    """Answers a line of JSON with a line until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params") or {})
        error = {"error": {"code": -32601, "message": "no such method"}}
        body = error if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}), flush=True)


if __name__ == "__main__":
    main()
