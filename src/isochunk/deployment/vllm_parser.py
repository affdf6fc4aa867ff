"""vLLM's own parser, asked in a process of its own: importing vLLM takes seconds, once for a whole deployment."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from isochunk.core.errors import ConfigError
from isochunk.deployment.option_table import Parsed, RefusedError

__all__ = ["VllmParser"]


class VllmParser:
    """Asks a process that answers questions about command lines (`isochunk.vllm.arguments`).

    Args:
        command: what starts that process.

    Raises:
        ConfigError: the process ends before it answers; with the end of what it said.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.vllm = ""

    def __enter__(self) -> VllmParser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(10)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def wait(self) -> None:
        """Wait until vLLM is imported.

        Raises:
            ConfigError: it can't be; with the end of what was said.
        """
        if not self.vllm:
            try:
                self.vllm = str(self._line()["vllm"])
            except (ValueError, KeyError, TypeError):
                raise self._ended() from None

    def parse(self, words: Sequence[str], env: Mapping[str, str]) -> Parsed:
        """What the words give, by vLLM's names.

        Raises:
            RefusedError: vLLM refuses them.
            ConfigError: the process has ended.
        """
        answer = self._ask({"words": list(words), "env": dict(env)})
        if "error" in answer:
            raise RefusedError(str(answer["error"]))
        return dict(answer["options"])

    def complaints(self, words: Sequence[str], env: Mapping[str, str], config: str | None) -> list[str]:
        """What vLLM's configuration refuses of words that its parser takes.

        Args:
            config: folder of the model's ``config.json``, where there is one.
        """
        answer = self._ask({"words": list(words), "env": dict(env), "config": config, "verify": True})
        return [str(each) for each in answer["complaints"]]

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self.wait()
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._line()
        except (BrokenPipeError, ValueError, KeyError):
            raise self._ended() from None

    def _ended(self) -> ConfigError:
        self._process.kill()
        self._process.wait()
        self._listener.join(10)
        return ConfigError("vLLM's parser can't be asked; it said:\n" + "\n".join(self._said[-8:]))

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-50:], line.rstrip()]
