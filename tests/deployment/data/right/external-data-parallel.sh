# A command for each rank, as external load balancing has it.
KV='{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'
for RANK in 0 1 2 3; do
  CUDA_VISIBLE_DEVICES=$RANK VLLM_NIXL_SIDE_CHANNEL_PORT=5700 vllm serve Qwen/Qwen3-30B-A3B --port $((8200 + RANK)) \
    --data-parallel-size 4 --data-parallel-rank $RANK --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 13400 \
    --enable-expert-parallel --kv-transfer-config "$KV" &
done
CUDA_VISIBLE_DEVICES=4,5,6,7 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve Qwen/Qwen3-30B-A3B --port 8100 \
  --tensor-parallel-size 4 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &
python toy_proxy_server.py --port 8000 --prefiller-ports 8100 --decoder-ports 8200 8201 8202 8203
