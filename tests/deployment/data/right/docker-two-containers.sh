docker run -d --name prefill --gpus '"device=0"' --network host --ipc host \
  -e VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  vllm/vllm-openai:v0.32.0 --model Qwen/Qwen3-8B --port 8100 \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
docker run -d --name decode --gpus '"device=1"' --network host --ipc host \
  -e VLLM_NIXL_SIDE_CHANNEL_PORT=5610 \
  vllm/vllm-openai:v0.32.0 --model Qwen/Qwen3-8B --port 8200 \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'
isochunk proxy --prefiller-ports 8100 --decoder-ports 8200
