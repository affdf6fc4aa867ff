# expect: ports-apart
REPO=/home/me/repo
VENV="$REPO/python/.venv"
HOST_IP=10.12.0.7
common() { echo "--served-model-name m --host 0.0.0.0 --tensor-parallel-size 2"; }
PYTHONHASHSEED=0 CUDA_VISIBLE_DEVICES=2,3 VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  $VENV/bin/vllm serve /data/Qwen3-32B --served-model-name m --host 0.0.0.0 --port 18091 --tensor-parallel-size 2 --block-size 128 \
  --no-enable-prefix-caching --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' &
PYTHONHASHSEED=0 CUDA_VISIBLE_DEVICES=0,1 VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  $VENV/bin/vllm serve /data/Qwen3-32B --served-model-name m --host 0.0.0.0 --port 18090 --tensor-parallel-size 2 --block-size 128 \
  --no-enable-prefix-caching --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' &
