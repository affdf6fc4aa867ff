# expect: machines-complete
ssh n0 "VLLM_HOST_IP=10.3.0.1 vllm serve meta-llama/Llama-3.1-405B-Instruct -tp 8 -pp 3 --nnodes 3 --node-rank 0 --master-addr 10.3.0.1 --port 8000" &
ssh n1 "VLLM_HOST_IP=10.3.0.2 vllm serve meta-llama/Llama-3.1-405B-Instruct -tp 8 -pp 3 --nnodes 3 --node-rank 1 --headless --master-addr 10.3.0.1" &
