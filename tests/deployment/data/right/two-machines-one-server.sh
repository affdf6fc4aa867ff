# One P node over two machines, each with its own command.
ssh n0 "VLLM_HOST_IP=10.3.0.1 GLOO_SOCKET_IFNAME=eth0 VLLM_NIXL_SIDE_CHANNEL_HOST=10.3.0.1 isochunk serve Qwen/Qwen3-32B \
  --port 8100 -pp 2 -tp 8 --nnodes 2 --node-rank 0 --master-addr 10.3.0.1 --master-port 29600 --no-async-scheduling \
  --kv-transfer-config '{\"kv_connector\": \"NixlPushConnector\", \"kv_role\": \"kv_producer\"}'" &
ssh n1 "VLLM_HOST_IP=10.3.0.2 GLOO_SOCKET_IFNAME=eth0 VLLM_NIXL_SIDE_CHANNEL_HOST=10.3.0.2 isochunk serve Qwen/Qwen3-32B \
  -pp 2 -tp 8 --nnodes 2 --node-rank 1 --headless --master-addr 10.3.0.1 --master-port 29600 --no-async-scheduling \
  --kv-transfer-config '{\"kv_connector\": \"NixlPushConnector\", \"kv_role\": \"kv_producer\"}'" &
ssh n2 "VLLM_NIXL_SIDE_CHANNEL_HOST=10.3.0.3 vllm serve Qwen/Qwen3-32B --port 8200 -tp 8 \
  --kv-transfer-config '{\"kv_connector\": \"NixlPushConnector\", \"kv_role\": \"kv_consumer\"}'" &
isochunk proxy --prefiller-hosts 10.3.0.1 --prefiller-ports 8100 --decoder-hosts 10.3.0.3 --decoder-ports 8200
