"""What clients of the Responses API do in their own way: as OpenAI's others, but for an error within a stream."""

from server.api.errors import ApiError
from server.api.openai.dialect import OpenAiDialect
from server.api.openai.errors import error_body
from server.api.sse import sse_event


class ResponsesDialect(OpenAiDialect):
    """The endpoints of responses and conversations."""

    def error_frame(self, error: ApiError) -> bytes:
        """Returns an `error` event, with the fields of OpenAI's and, for its clients to raise, the error object."""
        told = {"code": error.code.value, "message": error.message, "param": error.param}
        return sse_event({"type": "error", "sequence_number": 0, **told, **error_body(error)}, "error")
