# expect: proxy-speaks-connector
CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-8B --port 8010 --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}' &
CUDA_VISIBLE_DEVICES=1 vllm serve Qwen/Qwen3-8B --port 8020 --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}' &
python tests/toy_proxy_server.py --port 8000 --prefiller-ports 8010 --decoder-ports 8020
