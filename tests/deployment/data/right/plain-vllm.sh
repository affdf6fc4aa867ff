uv run vllm serve mistralai/Mixtral-8x7B-Instruct-v0.1 --tensor-parallel-size 8 --max-model-len auto --api-key "$KEY"
