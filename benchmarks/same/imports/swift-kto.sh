swift rlhf --rlhf_type kto --model Qwen/Qwen3-8B --dataset marked.jsonl --beta 0.2 --deepspeed zero2
