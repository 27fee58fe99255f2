"""A request that is not answered, and how each of the two interfaces says so."""

from __future__ import annotations

from kafila.errors import KafilaError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(KafilaError):
    """A request gets an error for an answer: an HTTP status, words, and where they exist OpenAI's ``code`` and the
    field that is at fault."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def openai_body(self) -> dict[str, object]:
        """As OpenAI's interface writes it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def ollama_body(self) -> dict[str, object]:
        """As Ollama's interface writes it."""
        return {"error": str(self)}
