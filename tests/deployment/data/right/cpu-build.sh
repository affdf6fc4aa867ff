# vLLM's CPU build, both on one machine.
export UCX_TLS=tcp,self UCX_NET_DEVICES=lo
VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND="0|1" VLLM_NIXL_SIDE_CHANNEL_PORT=5600 isochunk serve /models/SmolLM2 \
  --host 127.0.0.1 --port 8100 --pipeline-parallel-size 2 --dtype float32 --max-model-len 8192 \
  --kv-transfer-config '{"kv_connector":"NixlPushConnector","kv_role":"kv_producer","kv_buffer_device":"cpu","kv_connector_extra_config":{"num_threads":0}}' &
VLLM_CPU_KVCACHE_SPACE=2 VLLM_NIXL_SIDE_CHANNEL_PORT=5601 vllm serve /models/SmolLM2 \
  --host 127.0.0.1 --port 8200 --dtype float32 --max-model-len 8192 \
  --kv-transfer-config '{"kv_connector":"NixlPushConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu","kv_connector_extra_config":{"num_threads":0}}' &
isochunk proxy --prefiller-ports 8100 --decoder-ports 8200
