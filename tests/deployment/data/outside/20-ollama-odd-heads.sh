# expect: tensor-divides-heads
vllm serve Qwen/Qwen2.5-32B-Instruct --tensor-parallel-size 16
