# expect: right
IP=$(hostname -I | awk '{print $1}')
docker run --gpus all --privileged --ipc=host -p 8000:8000 --network host \
    -v ~/.cache/huggingface:/root/.cache/huggingface \
    -e VLLM_ENGINE_READY_TIMEOUT_S=3600 \
    -e VLLM_NIXL_SIDE_CHANNEL_PORT=5557 \
    -e VLLM_NIXL_SIDE_CHANNEL_HOST=$IP \
    vllm/vllm-openai:v0.32.0 deepseek-ai/DeepSeek-V3.1 \
    --trust-remote-code --kv-cache-dtype fp8 --block-size 256 \
    --enable-expert-parallel --data-parallel-size 8 \
    --compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE", "custom_ops":["all"]}' \
    --tokenizer-mode auto --reasoning-parser deepseek_r1 --enable-auto-tool-choice --tool-call-parser deepseek_v3 \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'
