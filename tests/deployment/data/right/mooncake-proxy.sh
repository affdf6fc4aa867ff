# Mooncake's connector with its proxy, two machines in one script by ssh.
ssh root@192.168.0.2 "VLLM_MOONCAKE_BOOTSTRAP_PORT=8998 vllm serve Qwen/Qwen2.5-7B-Instruct --port 8010 \
  --kv-transfer-config '{\"kv_connector\":\"MooncakeConnector\",\"kv_role\":\"kv_producer\"}'" &
ssh root@192.168.0.3 "vllm serve Qwen/Qwen2.5-7B-Instruct --port 8020 \
  --kv-transfer-config '{\"kv_connector\":\"MooncakeConnector\",\"kv_role\":\"kv_consumer\"}'" &
python examples/online_serving/disaggregated_serving/mooncake_connector/mooncake_connector_proxy.py \
  --prefill http://192.168.0.2:8010 8998 --decode http://192.168.0.3:8020
