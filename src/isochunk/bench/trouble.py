"""What goes wrong between a client and a server, in words that name the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isochunk.core.errors import BrokenAnswerError, ConfigError, ServerError

if TYPE_CHECKING:
    import httpx

__all__ = ["message", "need_httpx", "no_url", "refusal", "unreachable"]


def need_httpx() -> Any:
    """The module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("this command needs httpx: pip install 'isochunk[bench]'") from error
    return httpx


def no_url(url: str, error: Exception) -> ServerError:
    """The address can't be one."""
    return ServerError(f"--url {url!r} is not a URL ({error}); give one like http://localhost:8000")


def unreachable(url: str, error: Exception) -> ServerError:
    """The server did not answer, or stopped in the middle."""
    httpx = need_httpx()
    if isinstance(error, httpx.UnsupportedProtocol):
        return no_url(url, error)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return BrokenAnswerError(f"can't connect to {url} ({error}); is the server running, and is this its address?")
    if isinstance(error, httpx.TimeoutException):
        return BrokenAnswerError(f"{url} said nothing until the time limit; look at the server's log")
    return BrokenAnswerError(f"lost the connection to {url} ({error or type(error).__name__}); did the server stop?")


def refusal(url: str, path: str, response: httpx.Response) -> ServerError:
    """The server answered with an error; the body of ``response`` has been read."""
    code = response.status_code
    if code == 401:
        return ServerError(f"{url} refused the API key ({code}); pass the server's own with --api-key")
    if code == 404 and path.startswith("/isochunk/"):
        return ServerError(
            f"{url} runs no isochunk (404 for {path}); start the server with isochunk enabled and "
            "VLLM_PLUGINS=isochunk (with any other plugin you use) in its environment, or with `isochunk serve`; "
            "of a proxy, ask the P node behind it"
        )
    try:
        text = message(response.json())
    except ValueError:
        text = response.text[:200]
    kind = BrokenAnswerError if code >= 500 else ServerError
    return kind(f"{url}{path} answered {code}: {text}")


def message(body: Any) -> str:
    """The human part of an error body in vLLM's, OpenAI's, isochunk's or FastAPI's form."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
