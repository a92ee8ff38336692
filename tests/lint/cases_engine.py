"""Mistakes that only show together: what does nothing, what excludes itself, batch, optimizers and schedules."""

from __future__ import annotations

from tests.lint.case import ADAMW, AUTO, CPU_OPTIMIZER, RAW, ZERO2, Becomes, Case, Raises, Says, top, zero

_MUON = '"optimizer": {"type": "Muon", "params": {"lr": "auto", "momentum": 0.95}}'
_STAGE12 = "deepspeed/runtime/zero/stage_1_and_2.py"
_ENGINE = "deepspeed/runtime/engine.py"

# fmt: off
NO_EFFECT: tuple[Case, ...] = (
    Case(name="parameters offloaded at stage 2", rule="DS201", fix='"stage": 3',
         text=zero(2, '⟦"offload_param": {"device": "cpu"}'), proof=Becomes(facts={"stage": 2, "offloads_params": False})),
    Case(name="an optimizer offloaded at stage 0", rule="DS201", fix='"stage": 2',
         text=zero(0, '⟦"offload_optimizer": {"device": "cpu"}'), proof=Becomes(facts={"stage": 0, "cpu_offload": False})),
    Case(name="an optimizer on NVMe at stage 2", rule="DS202", fix='"cpu"',
         text=zero(2, '"offload_optimizer": {⟦"device": "nvme", "nvme_path": "/nowhere"}'),
         proof=Becomes(facts={"cpu_offload": True, "swaps": False})),
    Case(name="hpZ at stage 2", rule="DS203", fix='"stage": 3', text=zero(2, '⟦"zero_hpz_partition_size": 2'),
         proof=Becomes(facts={"stage": 2, "wrapper": "DeepSpeedZeroOptimizer"})),
    Case(name="qwZ at stage 2", rule="DS203", fix='"stage": 3', text=zero(2, '⟦"zero_quantized_weights": true'),
         proof=Becomes(facts={"stage": 2, "wrapper": "DeepSpeedZeroOptimizer"})),
    Case(name="qgZ at stage 1", rule="DS203", fix='"stage": 3', text=zero(1, '⟦"zero_quantized_gradients": true'),
         proof=Becomes(facts={"stage": 1, "wrapper": "DeepSpeedZeroOptimizer"})),
    Case(name="a ratio at stage 2", rule="DS204", fix='"stage": 3',
         text=zero(2, '"offload_optimizer": {"device": "cpu", ⟦"ratio": 0.5}'),
         proof=Raises(words="Partial offload")),
    Case(name="SuperOffload at stage 2", rule="DS205", fix='"stage": 3',
         text=zero(2, '"offload_optimizer": {"device": "cpu", ⟦"super_offload": true}'),
         proof=Becomes(facts={"wrapper": "DeepSpeedZeroOptimizer"})),
    Case(name="sizes of stage 3 at stage 2", rule="DS206", fix="leave it",
         text=zero(2, '⟦"stage3_max_live_parameters": 1000000')),
    Case(name="activation checkpointing of DeepSpeed", rule="DS207", fix="grad_ckpt",
         text=top('⟦"activation_checkpointing": {"partition_activations": true}')),
    Case(name="DeepCompile that nobody calls", rule="DS208", fix="remove", text=top('"compile": {⟦"deepcompile": true}')),
    Case(name="a preset that there is not", rule="DS209", fix="llama",
         text=top('"tensor_parallel": {"autotp_size": 1, ⟦"preset_model": "lama3"}')),
    Case(name="sequence parallelism by a key alone", rule="DS211", fix="ParallelismConfig",
         text='{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
              ' "gradient_clipping": "auto", "bf16": {"enabled": "auto"},\n ⟦"sequence_parallel_size": 2,\n'
              ' "zero_optimization": {"stage": 2}}', proof=Becomes(facts={"train_batch_size": 1})),
    Case(name="a profiler left on", rule="DS212", fix="false", text=top('"comms_logger": {⟦"enabled": true}')),
    Case(name="timers left on", rule="DS212", fix="false", text=top('⟦"wall_clock_breakdown": true')),
    Case(name="a monitor of DeepSpeed", rule="DS213", fix="sinks",
         text=top('"tensorboard": {⟦"enabled": true, "output_path": "/tmp/x"}')),
    Case(name="a bucket that nothing reads", rule="DS214", fix="remove", text=zero(2, '⟦"allgather_bucket_size": 500000000')),
    Case(name="aio without NVMe", rule="DS215", fix="remove", text=top('⟦"aio": {"block_size": 1048576}')),
    Case(name="ZenFlow by an empty section", rule="DS216", fix="remove", text=zero(2, CPU_OPTIMIZER, '⟦"zenflow": {}', head=top(ADAMW, tail=""))),
    Case(name="autocast beside bf16", rule="DS217", fix="keep one", is_trainers=False,
         text=top('"torch_autocast": {⟦"enabled": true, "dtype": "bfloat16"}', head=RAW)),
)

CONFLICTS: tuple[Case, ...] = (
    Case(name="fp16 and bf16", rule="DS301", fix='"auto"', is_trainers=False,
         text=top('"fp16": {⟦"enabled": true}', head=RAW), proof=Raises(words="")),
    Case(name="an odd bucket", rule="DS302", fix="remove", text=zero(2, '⟦"allgather_bucket_size": 500000001'),
         proof=Raises(words="allgather_bucket_size must be a multiple")),
    Case(name="Muon with reduce_scatter", rule="DS303", fix='"reduce_scatter": false',
         text=zero(3, '⟦"reduce_scatter": true', head=top(_MUON, tail="")), proof=Raises(words="Muon and reduce scatter")),
    Case(name="prescaled gradients", rule="DS304", fix="remove", text=top('⟦"prescale_gradients": true'),
         proof=Raises(words="pre-scale gradients")),
    Case(name="predivided gradients", rule="DS305", fix="remove", text=top('⟦"gradient_predivide_factor": 2.0'),
         proof=Raises(words="gradient_predivide_factor")),
    Case(name="bf16 masters at stage 0", rule="DS306", fix='"stage": 1',
         text='{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
              ' "gradient_clipping": "auto",\n "bf16": {"enabled": "auto", ⟦"bf16_master_weights_and_grads": true},\n'
              ' "zero_optimization": {"stage": 0}}', proof=Raises(words="aster_weights_and_grads")),
    Case(name="bf16 states without masters", rule="DS306", fix="bf16_master_weights_and_grads",
         text='{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
              ' "gradient_clipping": "auto",\n "bf16": {"enabled": "auto", ⟦"bf16_optimizer_states": true},\n'
              ' "zero_optimization": {"stage": 2}}', proof=Raises(words="bf16_optimizer_states")),
    Case(name="ZenFlow without offload", rule="DS307", fix="offload_optimizer",
         text=zero(2, '⟦"zenflow": {"topk_ratio": 0.1}', head=top(ADAMW, tail="")),
         proof=Raises(words="Zenflow must be used with cpu offload")),
    Case(name="ZenFlow with automatic strategy and an interval", rule="DS308", fix="step",
         text=zero(2, CPU_OPTIMIZER, '"zenflow": {⟦"select_interval": 4}', head=top(ADAMW, tail="")),
         proof=Raises(words="auto select strategy")),
    Case(name="ZenFlow that updates less than it selects", rule="DS309", fix="select_interval",
         text=zero(2, CPU_OPTIMIZER, '"zenflow": {"select_strategy": "step", "select_interval": 2, ⟦"update_interval": 4}',
                   head=top(ADAMW, tail="")),
         proof=Raises(words="Select interval must be")),
    Case(name="ZenFlow with the Trainer's optimizer", rule="DS310", fix='"optimizer"',
         text=zero(2, CPU_OPTIMIZER, '⟦"zenflow": {"topk_ratio": 0.1}'), proof=Raises(words="")),
    Case(name="NVMe without a path", rule="DS311", fix="nvme_path",
         text=zero(3, '"offload_optimizer": {⟦"device": "nvme"}'), proof=Raises(words="NoneType")),
    Case(name="the old offload beside the new one", rule="DS312", fix="remove cpu_offload",
         text=zero(2, CPU_OPTIMIZER, '⟦"cpu_offload": true'), proof=Raises(words="offload_optimizer")),
    Case(name="the old ZeRO-1", rule="DS313", fix="remove", text=zero(1, '⟦"legacy_stage1": true'),
         proof=Raises(words="deprecated version of ZeRO Stage 1")),
    Case(name="summed gradients at stage 3", rule="DS314", fix='"mean"',
         text=zero(3, head=AUTO + '  ⟦"gradient_allreduce_op": "sum",\n'), proof=Raises(words="gradient_allreduce_op")),
    Case(name="no norm, and clipping", rule="DS315", fix="remove", text=zero(2, '⟦"compute_grad_norm": false'),
         proof=Raises(words="compute_grad_norm=false requires gradient_clipping=0")),
    Case(name="unmanaged accumulation with overlap", rule="DS316", fix='"overlap_comm": false',
         text=zero(1, '"overlap_comm": true', head=AUTO + '  ⟦"managed_gradient_accumulation": false,\n'),
         proof=Raises(words="managed_gradient_accumulation=False")),
    Case(name="qgZ without reduce_scatter", rule="DS317", fix='"reduce_scatter": true',
         text=zero(3, '"reduce_scatter": false', '⟦"zero_quantized_gradients": true'),
         proof=Says(file="deepspeed/runtime/zero/stage3.py",
                    text="when enable all_to_all_reduce, reduce_scatter should also be enabled")),
    Case(name="SuperOffload on NVMe", rule="DS318", fix='"cpu"',
         text=zero(3, '"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", ⟦"super_offload": true}'),
         proof=Says(file="deepspeed/runtime/superoffload/superoffload_stage3.py", text="accelerator.device_name() == 'cuda'")),
    Case(name="optimizer states offloaded twice", rule="DS319", fix="remove one",
         text=zero(3, CPU_OPTIMIZER, head=top('"compile": {"deepcompile": true, ⟦"offload_opt_states": true}', tail="")),
         proof=Says(file="deepspeed/compile/init_z3.py", text="compile.offload_opt_states cannot be combined with ZeRO's")),
    Case(name="two offload passes", rule="DS320", fix="remove one",
         text=zero(3, head=top('"compile": {"deepcompile": true, ⟦"offload_activation": true, "offload_parameters": true}', tail="")),
         proof=Says(file="deepspeed/compile/init_z3.py",
                    text="compile.offload_activation cannot be combined with offload_parameters")),
    Case(name="AutoEP at stage 3 with hpZ", rule="DS321", fix="remove one",
         text=zero(3, '⟦"zero_hpz_partition_size": 2',
                   head=top('"expert_parallel": {"enabled": true, "autoep_size": 2, "preset_model": "mixtral"}', tail="")),
         proof=Says(file=_ENGINE, text="AutoEP with ZeRO Stage 3 does not support hpZeRO secondary tensor groups")),
    Case(name="AutoEP's load balancing", rule="DS322", fix="remove",
         text=top('"expert_parallel": {"enabled": true, ⟦"load_balance_coeff": 0.01}'),
         proof=Raises(words="load_balance_coeff")),
    Case(name="DeepEP without its buffers", rule="DS323", fix="comm_max_tokens_per_rank",
         text=top('"expert_parallel": {"enabled": true, ⟦"comm_backend": "deepep"}'),
         proof=Raises(words="comm_max_tokens_per_rank")),
    Case(name="AutoTP and sequence parallelism", rule="DS324", fix="remove one", is_trainers=False,
         text=top('"sequence_parallel_size": 2', '"tensor_parallel": {⟦"autotp_size": 2}', head=RAW),
         proof=Says(file="deepspeed/module_inject/auto_ep_folding.py",
                    text="tensor_parallel.autotp_size and Ulysses sequence parallelism are mutually exclusive")),
    Case(name="fp32 sums at stage 0", rule="DS325", fix='"stage": 1', is_trainers=False,
         text=RAW + '  "data_types": {⟦"grad_accum_dtype": "fp32"},\n  "zero_optimization": {"stage": 0}\n}',
         proof=Raises(words="NotImplementedError")),
)

_EP = '"expert_parallel": {"enabled": true, "autoep_size": 2, "preset_model": "mixtral"'
_FOLDING = "deepspeed/module_inject/auto_ep_folding.py"

MORE_CONFLICTS: tuple[Case, ...] = (
    Case(name="bf16 masters with fp32 states on the GPU", rule="DS306", fix="bf16_optimizer_states",
         text='{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
              ' "gradient_clipping": "auto",\n "bf16": {"enabled": "auto", ⟦"bf16_master_weights_and_grads": true},\n'
              ' "zero_optimization": {"stage": 2}}', proof=Raises(words="DeepSpeedCPUAdam")),
    Case(name="ZenFlow's offload without overlap", rule="DS326", fix='"overlap_comm": true',
         text=zero(2, CPU_OPTIMIZER, '"zenflow": {"topk_ratio": 0.1, ⟦"offload": true}', head=top(ADAMW, tail="")),
         proof=Raises(words="should be used with overlap_comm")),
    Case(name="ZenFlow and accumulation", rule="DS327", fix="update_interval", is_trainers=False,
         text='{"train_micro_batch_size_per_gpu": 1,\n ⟦"gradient_accumulation_steps": 4,\n'
              ' "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},\n'
              ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}}'),
    Case(name="autocast and quantised weights", rule="DS328", fix="keep one", is_trainers=False,
         text=zero(3, '"zero_quantized_weights": true',
                   head='{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,\n'
                        ' "torch_autocast": {⟦"enabled": true, "dtype": "bfloat16"},\n'),
         proof=Says(file="deepspeed/runtime/torch_autocast.py",
                    text="Cannot enable both torch autocast and zero quantized weights")),
    Case(name="fp32 parameters in bf16", rule="DS329", fix="remove", is_trainers=False,
         text=top('"data_types": {⟦"param_dtype": "fp32"}', head=RAW), proof=Raises(words="param_dtype")),
    Case(name="a partial offload of Lion", rule="DS330", fix='"AdamW"',
         text=zero(3, '"offload_optimizer": {"device": "cpu", ⟦"ratio": 0.5}',
                   head=top('"optimizer": {"type": "Lion", "params": {"lr": "auto"}}', tail="")),
         proof=Says(file="deepspeed/runtime/zero/stage3.py", text="Hybrid Optimizer Only Supports DeepSpeedCPUAdam")),
    Case(name="AutoEP on NVMe", rule="DS321", fix="remove one",
         text=zero(3, '"offload_optimizer": {⟦"device": "nvme", "nvme_path": "/tmp"}', head=top(_EP + "}", tail="")),
         proof=Says(file=_ENGINE, text="AutoEP with ZeRO Stage 3 checkpointing does not support NVMe optimizer")),
    Case(name="AutoEP beside AutoTP with offload", rule="DS340", fix="remove one",
         text=zero(2, '⟦"offload_optimizer": {"device": "cpu"}',
                   head=AUTO.replace('  "train_batch_size": "auto",\n', "") + "  " + _EP + '},\n  "tensor_parallel": {"autotp_size": 2},\n'),
         proof=Says(file=_FOLDING, text="ZeRO optimizer/parameter offload with AutoEP+AutoTP folding is not validated yet")),
    Case(name="AutoEP of one beside AutoTP", rule="DS340", fix="above 1",
         text=zero(2, head=AUTO.replace('  "train_batch_size": "auto",\n', "")
                   + '  "expert_parallel": {"enabled": true, ⟦"autoep_size": 1},\n  "tensor_parallel": {"autotp_size": 2},\n'),
         proof=Says(file=_FOLDING, text="AutoEP+AutoTP folding requires expert_parallel.autoep_size > 1")),
    Case(name="compiling around the experts at stage 3", rule="DS341", fix="remove one",
         text=zero(3, head=top('"compile": {"autoep_non_moe": true}', tail="")).replace('"stage": 3', '⟦"stage": 3'),
         proof=Says(file=_ENGINE, text="compile.autoep_non_moe=True does not support ZeRO Stage 3 yet.")),
    Case(name="a fused sum over DeepEP", rule="DS342", fix='"comm"',
         text=top(_EP + ', "comm_backend": "deepep", "comm_max_tokens_per_rank": 8, ⟦"combine_impl": "fused_weighted_sum"}'),
         proof=Raises(words="combine_impl")),
)

BATCH: tuple[Case, ...] = (
    Case(name="no zero_optimization", rule="DS401", fix='"stage": 2',
         text='⟦{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}',
         proof=Raises(words="Please specify the ZeRO optimization config")),
    Case(name="no clipping", rule="DS402", fix='"gradient_clipping": "auto"',
         text='⟦{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",\n'
              ' "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}',
         proof=Becomes(facts={"clip": 1.0})),
    Case(name="no accumulation", rule="DS403", fix='"gradient_accumulation_steps": "auto"',
         text='⟦{"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",\n'
              ' "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}',
         arguments={"gradient_accumulation_steps": 2}, proof=Becomes(facts={"gas": 1})),
    Case(name="no batch", rule="DS404", fix="train_micro_batch_size_per_gpu", is_trainers=False,
         text='⟦{"zero_optimization": {"stage": 2}}', proof=Raises(words="needs to be provided", by="config")),
    Case(name="a stale batch", rule="DS405", fix="remove the line", is_trainers=False,
         text='{⟦"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,\n'
              ' "zero_optimization": {"stage": 2}}', proof=Raises(words="train_batch_size is not equal", by="config")),
    Case(name="the batch under tensor parallelism", rule="DS406", fix="remove the line",
         text='{⟦"train_batch_size": "auto",\n "tensor_parallel": {"autotp_size": 2},' + AUTO.split('"auto",', 1)[1] + ZERO2),
)

OPTIMIZERS: tuple[Case, ...] = (
    Case(name="an optimizer that there is not", rule="DS501", fix='"AdamW"',
         text=top('"optimizer": {⟦"type": "AdamWW", "params": {"lr": "auto"}}'), proof=Raises(words="AdamWW")),
    Case(name="a 1-bit optimizer", rule="DS501", fix="1-bit",
         text=top('"optimizer": {⟦"type": "OneBitAdam", "params": {"lr": "auto"}}'), proof=Raises(words="")),
    Case(name="a parameter that it does not take", rule="DS502", fix='"weight_decay"',
         text=top('"optimizer": {"type": "AdamW", "params": {"lr": "auto", ⟦"weight_decai": 0.1}}'),
         proof=Raises(words="weight_decai")),
    Case(name="clipping by the optimizer", rule="DS502", fix="gradient_clipping",
         text=top('"optimizer": {"type": "AdamW", "params": {"lr": "auto", ⟦"max_grad_norm": 1.0}}'),
         proof=Raises(words="max_grad_norm")),
    Case(name="a schedule that there is not", rule="DS503", fix='"WarmupDecayLR"',
         text=top(ADAMW, '"scheduler": {⟦"type": "WarmupDecay", "params": {"total_num_steps": "auto"}}'),
         proof=Raises(words="WarmupDecay")),
    Case(name="a schedule without its length", rule="DS504", fix='"total_num_steps"',
         text=top(ADAMW, '"scheduler": {"type": "WarmupDecayLR", ⟦"params": {"warmup_num_steps": "auto"}}'),
         proof=Raises(words="total_num_steps")),
    Case(name="a parameter of another schedule", rule="DS504", fix="remove it",
         text=top(ADAMW, '"scheduler": {"type": "WarmupLR", "params": {⟦"cycle_min_lr": 0.1}}'),
         proof=Raises(words="cycle_min_lr")),
    Case(name="no warm-up steps", rule="DS112", fix="at least 1",
         text=top(ADAMW, '"scheduler": {"type": "WarmupLR", "params": {⟦"warmup_num_steps": 0}}'),
         proof=Raises(words="warmup_num_steps")),
    Case(name="an optimizer without a type", rule="DS505", fix='"type"',
         text=top('⟦"optimizer": {"params": {"lr": "auto"}}'), proof=Raises(words="")),
    Case(name="nobody's optimizer", rule="DS508", fix="AdamW", is_trainers=False, text=RAW.replace("{", "⟦{", 1) + ZERO2),
    Case(name="an offloaded SGD", rule="DS507", fix='"AdamW"',
         text=zero(2, CPU_OPTIMIZER, head=top('"optimizer": {⟦"type": "SGD", "params": {"lr": 0.1}}', tail=""))),
    Case(name="stage 3 that saves nothing", rule="DS601", fix="true",
         text=AUTO + '  ⟦"zero_optimization": {"stage": 3}\n}', proof=Becomes(facts={"saved_weights": False})),
    Case(name="a bucket larger than any use", rule="DS701", fix="200000000",
         text=zero(2, '⟦"reduce_bucket_size": 5000000000')),
    Case(name="more prefetched than live", rule="DS702", fix="raise",
         text=zero(3, '⟦"stage3_prefetch_bucket_size": 50000000', '"stage3_max_live_parameters": 1000000')),
    Case(name="a sub-group without end", rule="DS703", fix="1000000000", text=zero(3, '⟦"sub_group_size": 1e14')),
)

KNOWLEDGE: tuple[Case, ...] = (
    Case(name="clipping that contradicts the job", rule="DS410", fix="", text=AUTO.replace(
        '"gradient_clipping": "auto"', '"gradient_clipping": 0.5') + ZERO2,
         proof=Raises(words="- ds gradient_clipping=0.5 vs hf max_grad_norm=0.3")),
    Case(name="fp16 that contradicts the job", rule="DS410", fix="", text=top('"fp16": {"enabled": true}'),
         proof=Raises(words="fp16")),
    Case(name="a size of a composite model", rule="DS603", fix="", is_composite=True,
         text=zero(2, '"stage3_prefetch_bucket_size": "auto"'), proof=Raises(words="hidden_size")),
    Case(name="tensor parallelism that does not divide", rule="DS801", fix="", is_trainers=False,
         text=top('"tensor_parallel": {"autotp_size": 3}', head=RAW), proof=Raises(words="")),
    Case(name="hpZ that does not divide", rule="DS801", fix="", text=zero(3, '"zero_hpz_partition_size": 3'),
         proof=Becomes(facts={"hpz_group": 2})),
)
"""Proofs of rules that ask for a job, a model or machines; where they stand is tested in test_known.py."""

ENGINE_CASES: tuple[Case, ...] = (*NO_EFFECT, *CONFLICTS, *MORE_CONFLICTS, *BATCH, *OPTIMIZERS)
# fmt: on
