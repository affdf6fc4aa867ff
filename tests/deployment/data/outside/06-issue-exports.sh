# expect: ports-apart
# The side channel's port is exported once, for both.
export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1
export VLLM_NIXL_SIDE_CHANNEL_PORT=9527
CUDA_VISIBLE_DEVICES=0 vllm serve ${HOST_MODEL_PATH}/${MODEL_NAME} --enforce-eager --port 8100 --max-model-len ${MAX_MODEL_LEN} \
    --gpu-memory-utilization 0.9 --trust-remote-code --tensor-parallel-size 1 --block-size ${BLOCK_SIZE} \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
CUDA_VISIBLE_DEVICES=1 vllm serve ${HOST_MODEL_PATH}/${MODEL_NAME} --enforce-eager --port 8200 --max-model-len ${MAX_MODEL_LEN} \
    --gpu-memory-utilization 0.9 --trust-remote-code --tensor-parallel-size 1 --block-size ${BLOCK_SIZE} \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'
