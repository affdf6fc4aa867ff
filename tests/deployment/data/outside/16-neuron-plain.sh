# expect: right
export NEURON_RT_VISIBLE_CORES=0-7
python -m vllm.entrypoints.openai.api_server --model openlm-research/open_llama_3b --max-num-seqs 8 --max-model-len 1024 \
  --tensor-parallel-size 2 --block-size 16 --no-enable-prefix-caching --port ${PORT:-8000}
