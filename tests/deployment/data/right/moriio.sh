export VLLM_ROCM_USE_AITER=1
HIP_VISIBLE_DEVICES=0,1,2,3 vllm serve deepseek-ai/DeepSeek-V3 -tp 4 --port 20005 --trust-remote-code \
  --kv-transfer-config '{"kv_connector":"MoRIIOConnector","kv_role":"kv_producer","kv_port":32988,
  "kv_connector_extra_config":{"proxy_ip":"127.0.0.1","proxy_ping_port":"36367","http_port":"20005","handshake_port":"60000","notify_port":"61005"}}' &
HIP_VISIBLE_DEVICES=4,5,6,7 vllm serve deepseek-ai/DeepSeek-V3 -tp 4 --port 40005 --trust-remote-code \
  --kv-transfer-config '{"kv_connector":"MoRIIOConnector","kv_role":"kv_consumer","kv_port":31988,
  "kv_connector_extra_config":{"proxy_ip":"127.0.0.1","proxy_ping_port":"36367","http_port":"40005","handshake_port":"62000","notify_port":"63005"}}' &
python moriio_toy_proxy_server.py
