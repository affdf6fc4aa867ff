# expect: proxy-knows-nodes
for i in 0 1; do
  CUDA_VISIBLE_DEVICES=$i VLLM_NIXL_SIDE_CHANNEL_PORT=$((5600+i)) vllm serve Qwen/Qwen3-4B --port $((8100+i)) \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &
done
CUDA_VISIBLE_DEVICES=2 VLLM_NIXL_SIDE_CHANNEL_PORT=5610 vllm serve Qwen/Qwen3-4B --port 8200 \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' &
vllm-router --policy round_robin --vllm-pd-disaggregation --prefill http://127.0.0.1:8100 --prefill http://127.0.0.1:8102 --decode http://127.0.0.1:8200 --port 30000
