"""Errors in OpenAI's format, for everything that can go wrong with a request."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from eagle_rt.server.process import EngineDiedError


class ApiError(Exception):
    """An error with its HTTP status and OpenAI's `type`, `param` and `code`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    kind = {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
    return JSONResponse(error_body(message, kind if status < 500 else "server_error", param, code), status)


def parameter_in(message: str) -> str | None:
    """Messages of our own about a parameter begin with its name."""
    name, _, rest = message.partition(" is ")
    name = name.partition(".")[0]
    return name if rest and name.isidentifier() else None


def told_of(problem: Mapping[str, Any]) -> tuple[list[str], str]:
    """One of pydantic's: where it is, and what the user is told."""
    place = [str(part) for part in problem["loc"] if part != "body"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"{'.'.join(place)} is not a known parameter"
    elif place:
        message = f"{'.'.join(place)}: {message}"
    return place, message


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error.status, str(error), error.param, error.code)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_response(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
        place, message = told_of(first)
        return error_response(400, message, place[0] if place else parameter_in(message))

    @app.exception_handler(ValueError)
    async def bad_value(_: Request, error: ValueError) -> JSONResponse:
        code = "context_length_exceeded" if "context length" in str(error) else None
        return error_response(400, str(error), parameter_in(str(error)), code)

    @app.exception_handler(EngineDiedError)
    async def engine_died(_: Request, error: EngineDiedError) -> JSONResponse:
        return error_response(503, "the engine has died and the server is about to exit; its log says why", code="engine_dead")

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> JSONResponse:
        return error_response(500, f"the server failed at this request ({type(error).__name__}); its log says where")

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, str(error.detail))
