export MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=65535
export MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER=65535
KV='{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_connector_extra_config":{"mooncake_protocol":"tcp","num_workers":4}}'
CUDA_VISIBLE_DEVICES=0,1 isochunk serve Qwen/Qwen3-8B --port 8100 -pp 2 --no-async-scheduling --kv-transfer-config "$KV" &
CUDA_VISIBLE_DEVICES=2 vllm serve Qwen/Qwen3-8B --port 8200 \
  --kv-transfer-config "${KV/kv_producer/kv_consumer}" &
isochunk proxy --port 8000 --prefiller-ports 8100 --prefiller-bootstrap-ports 8998 --decoder-ports 8200
