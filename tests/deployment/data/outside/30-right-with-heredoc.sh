# expect: right
#!/usr/bin/env bash
cat > config.yaml <<EOF
chunk_size: 256
local_cpu: true
EOF
source .env 2>/dev/null || true
nvidia-smi | head -5
case "$1" in
  start) echo starting ;;
esac
for p in 8100; do
  (CUDA_VISIBLE_DEVICES=0 LMCACHE_CONFIG_FILE=config.yaml vllm serve "Qwen/Qwen3-8B" --port "$p" --kv-transfer-config="{\"kv_connector\":\"LMCacheConnectorV1\",\"kv_role\":\"kv_both\"}" 2>&1 | tee log.txt) &
done
until curl -s localhost:8100/health; do sleep 1; done
