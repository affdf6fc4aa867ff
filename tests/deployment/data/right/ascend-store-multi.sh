# Hand-over and a pool, inside a MultiConnector.
export ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
export PYTHONHASHSEED=0
vllm serve Qwen/Qwen3-32B --port 8100 -tp 8 --served-model-name q --max-model-len 32000 \
  --kv-transfer-config '{
  "kv_connector": "MultiConnector",
  "kv_role": "kv_producer",
  "kv_connector_extra_config": {
    "connectors": [
      {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "28100",
       "kv_connector_extra_config": {"prefill": {"dp_size": 1, "tp_size": 8}, "decode": {"dp_size": 1, "tp_size": 8}}},
      {"kv_connector": "AscendStoreConnector", "kv_role": "kv_producer",
       "kv_connector_extra_config": {"lookup_rpc_port": "0", "backend": "mooncake"}}
    ]
  }
}'
