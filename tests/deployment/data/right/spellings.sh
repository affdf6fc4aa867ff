# Abbreviations, underscores, dotted keys, human numbers, short options.
isochunk serve Qwen/Qwen3-235B-A22B-Instruct-2507 -pp 4 --tensor-parallel 4 --max-model 200k --max_num_batched_tokens=32K \
  --gpu-memory-util 0.9 --trust-remote --no-async --served-model q235 \
  --kv-transfer-config.kv_connector NixlPushConnector --kv-transfer-config.kv_role kv_producer \
  --kv-transfer-config.kv_connector_extra_config.kv_lease_duration 120 -cc.mode 3 -O2 --kv-cache-dtype auto --port 8100
