#!/bin/bash
#SBATCH --nodes=2
export WANDB_PROJECT=mine
torchrun --nproc_per_node 8 --nnodes 2 train.py \
  --model_name_or_path Qwen/Qwen3-8B --data_path data.json --bf16 True --output_dir out \
  --num_train_epochs 3 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 \
  --save_strategy steps --save_steps 200 --learning_rate 2e-5 --weight_decay 0. --warmup_ratio 0.03 \
  --lr_scheduler_type cosine --logging_steps 1 --model_max_length 4096 --gradient_checkpointing True \
  --lora_enable True --lora_r 16 --lora_alpha 32 --report_to tensorboard
