# As test scripts start several of each: loops, arithmetic, arrays.
NUM_P=2
NUM_D=2
P_PORTS=()
D_PORTS=()
for i in $(seq 0 $((NUM_P - 1))); do
  PORT=$((8100 + i))
  SIDE=$((5559 + i))
  CUDA_VISIBLE_DEVICES=$i VLLM_NIXL_SIDE_CHANNEL_PORT=$SIDE vllm serve Qwen/Qwen2.5-1.5B-Instruct \
    --port $PORT --block-size 128 --gpu-memory-utilization 0.3 --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}' &
  P_PORTS+=($PORT)
done
for ((i=0; i<NUM_D; i++)); do
  PORT=$((8200 + i))
  SIDE=$((5659 + i))
  env CUDA_VISIBLE_DEVICES=$((i + 2)) VLLM_NIXL_SIDE_CHANNEL_PORT=$SIDE vllm serve Qwen/Qwen2.5-1.5B-Instruct \
    --port $PORT --block-size 128 --gpu-memory-utilization 0.3 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}' &
  D_PORTS+=($PORT)
done
python3 toy_proxy_server.py --port 8192 --prefiller-ports ${P_PORTS[@]} --decoder-ports "${D_PORTS[@]}"
