"""Stand-ins for providers, each with its path, its way of taking a key and what it refuses.

    with ProviderServer("gemini", key="k", answer=essay) as server:
        Endpoint(model="m", base_url=server.base_url)

What they do follows the providers' documentation, and reports of their users where that is silent,
as of November 2026. They are no more than that: nobody's servers were asked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.servers.loopback import Asked, JsonServer, Reply
from tests.support.servers.openai_server import Body, completion, is_probe

PATHS = {
    "anthropic": "/v1",
    "gemini": "/v1beta/openai",
    "deepseek": "",
    "openrouter": "/api/v1",
    "azure": "/openai/deployments/D",
}
AZURE_VERSION = "2024-10-21"


class ProviderServer(JsonServer):
    """One provider. `model` is all that it has."""

    def __init__(self, provider: str, key: str, answer: Callable[[Body], str], model: str = "m"):
        self.provider, self.key, self.says, self.model = provider, key, answer, model
        self.requests: list[Body] = []
        """Bodies of what was answered."""
        self.refused: list[str] = []
        """What was refused, in the words that were sent back."""
        self.headers: list[dict[str, str]] = []
        """Of every request, names in lower case."""
        self.credit = True
        self._lock = threading.Lock()
        super().__init__()

    @property
    def base_url(self) -> str:
        version = f"?api-version={AZURE_VERSION}" if self.provider == "azure" else ""
        return f"{self.url}{PATHS[self.provider]}{version}"

    def answer(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply(404, _error("no list of models", 404))
        body, headers = asked.body, asked.headers
        with self._lock:
            self.headers.append(dict(headers))
        error = self._wrong_path(asked.target) or self._unpaid(headers) or self._wrong_model(body)
        error = error or getattr(self, f"_{self.provider}")(body)
        with self._lock:
            if error is not None:
                self.refused.append(json.dumps(error.content))
                return error
            self.requests.append(body)
        return Reply(200, completion(body, "yes" if is_probe(body) else self.says(body)))

    def _wrong_path(self, target: str) -> Reply | None:
        parts = urlsplit(target)
        version = parse_qs(parts.query).get("api-version", [""])[0]
        right = parts.path == f"{PATHS[self.provider]}/chat/completions"
        if right and (self.provider != "azure" or version == AZURE_VERSION):
            return None
        if self.provider == "openrouter":
            return Reply(200, "<!DOCTYPE html><html>a page for people</html>")
        return Reply(404, _error("Resource not found", "404"))

    def _unpaid(self, headers: Mapping[str, str]) -> Reply | None:
        sent = headers.get("api-key") if self.provider == "azure" else headers.get("authorization")
        if sent != (self.key if self.provider == "azure" else f"Bearer {self.key}"):
            if self.provider == "gemini":
                message = "API key not valid. Please pass a valid API key."
                return Reply(400, [_error(message, 400, status="INVALID_ARGUMENT")])
            return Reply(401, _error("Authentication fails", "invalid_request_error"))
        if not self.credit:
            return Reply(402, _error("Insufficient Balance", "invalid_request_error"))
        return None

    def _wrong_model(self, body: Body) -> Reply | None:
        if self.provider == "azure" or body["model"] == self.model:
            return None
        name = body["model"]
        replies: dict[str, Reply] = {
            "anthropic": Reply(404, _error(f"model: {name}", "not_found_error")),
            "gemini": Reply(
                404, [_error(f"models/{name} is not found for API version v1main", 404)]
            ),
            "deepseek": Reply(400, _error("Model Not Exist", "invalid_request_error")),
            "openrouter": Reply(400, _error(f"{name} is not a valid model ID", 400)),
        }
        return replies[self.provider]

    # -- what each of them does not take; None: everything is in order --

    def _anthropic(self, body: Body) -> Reply | None:
        """A form, a seed and an effort are ignored without a word; two ways to sample are not."""
        if "temperature" in body and "top_p" in body:
            message = "`temperature` and `top_p` cannot both be specified for this model."
            return Reply(400, _error(message, "invalid_request_error"))
        return None

    def _gemini(self, body: Body) -> Reply | None:
        if "seed" in body:
            message = 'Invalid JSON payload received. Unknown name "seed": Cannot find field.'
            return Reply(400, [_error(message, 400, status="INVALID_ARGUMENT")])
        return None

    def _deepseek(self, body: Body) -> Reply | None:
        if (body.get("response_format") or {}).get("type") == "json_schema":
            message = "This response_format type is unavailable now"
            return Reply(400, _error(message, "invalid_request_error"))
        return None

    def _openrouter(self, body: Body) -> Reply | None:
        """Refuses nothing itself; a failing provider behind it is reported with status 200."""
        if len(self.requests) == 2 and not self.refused:
            return Reply(200, {"error": {"code": 502, "message": "Provider returned error"}})
        return None

    def _azure(self, body: Body) -> Reply | None:
        if "max_tokens" in body and not is_probe(body):
            message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return Reply(400, _error(message, "unsupported_parameter", param="max_tokens"))
        return None


def _error(message: str, code: str | int, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "code": code, **more}}
