#!/usr/bin/env bash
set -euo pipefail
MODEL="${MODEL:-Qwen/Qwen3-4B}"
BASE_PORT=${BASE_PORT:-8100}
COMMON=(--max-model-len 16384 --gpu-memory-utilization 0.85 --trust-remote-code)
launch() {
  local gpu=$1 port=$2 side=$3 role=$4
  echo "starting $role on $gpu"
  CUDA_VISIBLE_DEVICES=$gpu VLLM_NIXL_SIDE_CHANNEL_PORT=$side \
    vllm serve "$MODEL" --port "$port" "${COMMON[@]}" \
    --kv-transfer-config "{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"$role\"}" \
    > "/tmp/$role.log" 2>&1 &
}
launch 0 "$BASE_PORT" 5600 kv_producer
launch 1 "$((BASE_PORT + 100))" 5700 kv_consumer
if [[ "${PROXY:-1}" == "1" ]]; then
  python toy_proxy_server.py --port 8000 --prefiller-ports 8100 --decoder-ports 8200
fi
