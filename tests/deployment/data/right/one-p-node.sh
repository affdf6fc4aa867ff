isochunk serve deepseek-ai/DeepSeek-R1 \
  --pipeline-parallel-size 2 \
  --tensor-parallel-size 8 \
  --trust-remote-code \
  --max-num-batched-tokens 32768 \
  --no-async-scheduling
