docker run --rm --name vllm-ascend --net=host --shm-size=1g --privileged \
  --device /dev/davinci0 --device /dev/davinci_manager \
  -e ASCEND_RT_VISIBLE_DEVICES=0,1 -e HCCL_BUFFSIZE=256 \
  -v /usr/local/dcmi:/usr/local/dcmi -v /root/.cache:/root/.cache \
  -it quay.io/ascend/vllm-ascend:v0.23.0 \
  bash -c "vllm serve Qwen/Qwen3-8B --port 8100 -tp 2 --max-model-len 16384 \
    --kv-transfer-config '{\"kv_connector\": \"MooncakeConnectorV1\", \"kv_role\": \"kv_producer\", \"kv_port\": \"30000\", \
    \"kv_connector_extra_config\": {\"prefill\": {\"dp_size\": 1, \"tp_size\": 2}, \"decode\": {\"dp_size\": 1, \"tp_size\": 2}}}'"
