# expect: length-within-positions
CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve Qwen/Qwen2.5-14B-Instruct --tensor-parallel-size 4 --max-model-len 65536 --max-num-batched-tokens 8192
