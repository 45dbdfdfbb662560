"""`GET /metrics`: counters and gauges for Prometheus, in its text format or OpenMetrics."""

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from server.api.auth import is_owner
from server.api.context import context_of
from server.api.errors import ApiError, Code


async def metrics(request: Request) -> Response:
    """Answers at once, whatever the engines are doing; raises ApiError (403) for a key that is no operator's."""
    context = context_of(request)
    # One key that all clients have says nothing of who asks.
    if context.config.api_keys_file is not None and not is_owner(request, context.config):
        raise ApiError(Code.OPERATOR_ONLY, "metrics are of all keys together; send the key of an operator")
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(context.metrics.registry), media_type=content_type)
