# 1P1D on one machine with eight NPUs.
export HCCL_IF_IP=192.0.0.1
export GLOO_SOCKET_IFNAME="eth0"
export HCCL_SOCKET_IFNAME="eth0"
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True

ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 vllm serve /model/Qwen3-30B-A3B \
  --host 0.0.0.0 --port 13700 --tensor-parallel-size 4 --no-enable-prefix-caching --seed 1024 \
  --served-model-name qwen3 --max-model-len 40000 --max-num-batched-tokens 40000 --trust-remote-code \
  --gpu-memory-utilization 0.9 --enable-expert-parallel \
  --kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "30000",
    "engine_id": "0", "kv_connector_extra_config": {
      "prefill": {"dp_size": 1, "tp_size": 4}, "decode": {"dp_size": 1, "tp_size": 4}}}' &

ASCEND_RT_VISIBLE_DEVICES=4,5,6,7 vllm serve /model/Qwen3-30B-A3B \
  --host 0.0.0.0 --port 13701 --tensor-parallel-size 4 --no-enable-prefix-caching --seed 1024 \
  --served-model-name qwen3 --max-model-len 40000 --max-num-batched-tokens 256 --trust-remote-code \
  --gpu-memory-utilization 0.9 --enable-expert-parallel \
  --kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_consumer", "kv_port": "30100",
    "engine_id": "1", "kv_connector_extra_config": {
      "prefill": {"dp_size": 1, "tp_size": 4}, "decode": {"dp_size": 1, "tp_size": 4}}}' &

python load_balance_proxy_server_example.py --host 192.0.0.1 --port 8080 \
  --prefiller-hosts 192.0.0.1 --prefiller-port 13700 --decoder-hosts 192.0.0.1 --decoder-ports 13701
