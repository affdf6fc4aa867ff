CUDA_VISIBLE_DEVICES=0,1 VLLM_MOONCAKE_BOOTSTRAP_PORT=8998 vllm serve Qwen/Qwen3-14B -tp 2 --port 8100 \
  --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}' &
CUDA_VISIBLE_DEVICES=2,3 vllm serve Qwen/Qwen3-14B -tp 2 --port 8200 \
  --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}' &
vllm-router --host 0.0.0.0 --port 8000 --vllm-pd-disaggregation --kv-connector mooncake \
  --prefill http://127.0.0.1:8100 8998 --decode http://127.0.0.1:8200
