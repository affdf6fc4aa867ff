#!/bin/sh
# A template that a launcher calls for each data-parallel rank.
nic_name="eth0"
local_ip="192.0.0.1"
export HCCL_IF_IP=$local_ip
export GLOO_SOCKET_IFNAME=$nic_name
export TP_SOCKET_IFNAME=$nic_name
export HCCL_SOCKET_IFNAME=$nic_name
export OMP_NUM_THREADS=10
export ASCEND_RT_VISIBLE_DEVICES=$1
vllm serve /path_to_weight/DeepSeek-R1-w8a8 \
  --host 0.0.0.0 \
  --port $2 \
  --data-parallel-size $3 \
  --data-parallel-rank $4 \
  --data-parallel-address $5 \
  --data-parallel-rpc-port $6 \
  --tensor-parallel-size $7 \
  --enable-expert-parallel \
  --served-model-name ds_r1 \
  --max-model-len 40000 \
  --max-num-batched-tokens 16384 \
  --enforce-eager \
  --trust-remote-code \
  --quantization ascend \
  --speculative-config '{"num_speculative_tokens": 1, "method": "mtp"}' \
  --kv-transfer-config \
  '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "36000",
    "kv_parallel_size": "1", "kv_buffer_device": "npu",
    "kv_connector_extra_config": {"prefill": {"dp_size": 2, "tp_size": 8}, "decode": {"dp_size": 32, "tp_size": 1}}}'
