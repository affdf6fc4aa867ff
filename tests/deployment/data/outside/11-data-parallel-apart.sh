# expect: right
CUDA_VISIBLE_DEVICES=0,1,2,3 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve deepseek-ai/DeepSeek-V2-Lite --port 8100 \
  --data-parallel-size 4 --enable-expert-parallel --trust-remote-code \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &
CUDA_VISIBLE_DEVICES=4,5,6,7 VLLM_NIXL_SIDE_CHANNEL_PORT=5604 vllm serve deepseek-ai/DeepSeek-V2-Lite --port 8200 \
  --data-parallel-size 4 --enable-expert-parallel --trust-remote-code \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' &
