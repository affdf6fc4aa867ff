# LMCache's own hand-over; each node has a file of LMCache's settings.
UCX_TLS=cuda_ipc,cuda_copy,tcp LMCACHE_CONFIG_FILE=lmcache-prefiller-config.yaml CUDA_VISIBLE_DEVICES=0 \
  vllm serve meta-llama/Llama-3.1-8B-Instruct --port 8100 --enforce-eager \
  --kv-transfer-config \
  '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_producer","kv_connector_extra_config": {"discard_partial_chunks": false, "lmcache_rpc_port": "producer1"}}' &
UCX_TLS=cuda_ipc,cuda_copy,tcp LMCACHE_CONFIG_FILE=lmcache-decoder-config.yaml CUDA_VISIBLE_DEVICES=1 \
  vllm serve meta-llama/Llama-3.1-8B-Instruct --port 8200 --enforce-eager \
  --kv-transfer-config \
  '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer","kv_connector_extra_config": {"discard_partial_chunks": false, "lmcache_rpc_port": "consumer1"}}' &
python3 ../disagg_proxy_server.py --host localhost --port 9000 --prefiller-host localhost --prefiller-port 8100 \
  --decoder-host localhost --decoder-port 8200
