"""What a client is told when it gets no answer: a status code and OpenAI's error object."""

from __future__ import annotations

from typing import Any

# Our error classes of an item, and the status that says whose fault it was.
STATUS_OF_CLASS = {
    "timeout": 504,
    "replica_lost": 503,
    "out_of_memory": 503,
    "internal": 500,
    "non_finite": 500,
}
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiFault(Exception):
    """Ends one request. status: of HTTP; param: the field at fault; code: a word for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error object that OpenAI's clients read."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    @property
    def headers(self) -> dict[str, str]:
        """When to come again, for those who may."""
        return {"retry-after": "1"} if self.status in (429, 503) else {}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiFault:
    """The request itself cannot be answered."""
    return ApiFault(400, message, param=param, code=code)


def of_item(error_class: str, message: str) -> ApiFault:
    """An item that the pool gave up, or refused."""
    return ApiFault(STATUS_OF_CLASS.get(error_class, 400), f"{error_class}: {message}", code=error_class)
