# D splits the heads further than P; blocks of D hold several of P's.
CUDA_VISIBLE_DEVICES=0 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve meta-llama/Llama-3.1-8B-Instruct --port 8100 --block-size 16 \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &
CUDA_VISIBLE_DEVICES=4,5,6,7 VLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve meta-llama/Llama-3.1-8B-Instruct --port 8200 -tp 4 --block-size 64 \
  --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' &
python toy_proxy_server.py --prefiller-ports 8100 --decoder-ports 8200
