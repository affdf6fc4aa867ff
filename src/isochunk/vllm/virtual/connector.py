"""A KV connector without KV: hands over what a proxy and its nodes tell each other, and moves nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

__all__ = ["VirtualConnector"]


class VirtualConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """On P: every prompt's KV is kept for nobody and freed at once, but its answer names a place as others do.

    On D: what a peer computed is there when it is asked for. The methods are `KVConnectorBase_V1`'s; there are no
    workers, so theirs are never called.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All of the prompt but its last token, when a peer has computed it."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        return max(request.num_prompt_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """What was loaded once is not loaded again."""
        if num_external_tokens and request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing: no worker reads it."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Where D would fetch the KV of a prompt that was computed for it."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [len(group) for group in block_ids],
            "remote_engine_id": self._kv_transfer_config.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": "virtual",
            "remote_port": 0,
        }

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Never called."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Never called."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Never called."""

    def wait_for_save(self) -> None:
        """Never called."""
