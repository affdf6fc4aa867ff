# expect: proxy-knows-nodes
ssh 10.2.0.1 "VLLM_NIXL_SIDE_CHANNEL_HOST=10.2.0.1 vllm serve Qwen/Qwen3-8B --port 8100 --kv-transfer-config '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_producer\"}'" &
ssh 10.2.0.2 "VLLM_NIXL_SIDE_CHANNEL_HOST=10.2.0.2 vllm serve Qwen/Qwen3-8B --port 8200 --kv-transfer-config '{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_consumer\"}'" &
python3 toy_proxy_server.py --host 0.0.0.0 --port 8192 --prefiller-hosts 10.2.0.2 --prefiller-ports 8100 --decoder-hosts 10.2.0.1 --decoder-ports 8200
