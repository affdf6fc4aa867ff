#!/bin/bash
# One prefill and one decode server on two GPUs of one machine, NIXL, and its toy proxy.
MODEL=Qwen/Qwen3-0.6B
export UCX_NET_DEVICES=all

CUDA_VISIBLE_DEVICES=0 \
VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
vllm serve $MODEL \
  --port 8100 \
  --enforce-eager \
  --gpu-memory-utilization 0.8 \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}' > prefill.log 2>&1 &

CUDA_VISIBLE_DEVICES=1 \
VLLM_NIXL_SIDE_CHANNEL_PORT=5601 \
vllm serve $MODEL \
  --port 8200 \
  --enforce-eager \
  --gpu-memory-utilization 0.8 \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}' > decode.log 2>&1 &

wait_for_server 8100
wait_for_server 8200
python tests/v1/kv_connector/nixl_integration/toy_proxy_server.py --port 8192 \
  --prefiller-hosts localhost --prefiller-ports 8100 --decoder-hosts localhost --decoder-ports 8200
