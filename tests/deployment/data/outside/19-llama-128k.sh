# expect: right
CUDA_VISIBLE_DEVICES=0,1,2,3 isochunk serve meta-llama/Llama-3.3-70B-Instruct -tp 2 -pp 2 --max-model-len 131072 --no-async-scheduling
