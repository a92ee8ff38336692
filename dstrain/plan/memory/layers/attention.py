"""Attention on the tape: the kernel CUDA runs, what it saves, and Transformers' copies around it."""

from __future__ import annotations

from dataclasses import replace

from dstrain.choices import Attention
from dstrain.facts.cluster.gpus import Gpu
from dstrain.plan.configuration import Configuration
from dstrain.plan.memory.layers import ops
from dstrain.plan.memory.layers.context import Context
from dstrain.plan.memory.layers.tape import Tensor, Tensors

WIDEST_FLASH_HEAD = 256
"""Elements of a head above which there is no flash kernel.
Source: torch 2.13 ATen/native/transformers/cuda/sdp_utils.cpp: check_head_dim_size_flash."""
AT_ONCE_TOKENS = 8192
"""Tokens of a packed row up to which its samples are attended at once, however few there are."""
MOST_APART = 2
"""Samples of a longer row up to which they are attended one by one."""
WIDEST_AT_ONCE = 192
"""Elements of a head up to which every GPU from compute capability 8.0 on does that, with gradients. Source: torch 2.13
cuda/sdp_utils.cpp: check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
ALIGNMENT = 8
"""Elements in half precision, half as many in fp32, to which the memory-efficient kernel aligns heads.
Source: as above, check_head_dim_size_mem_efficient."""


def as_attended(configuration: Configuration, gpu: Gpu) -> Configuration:
    """Returns the configuration as it runs on a GPU: AMD's, old ones and CPUs attend packed samples one by one."""
    if gpu.compute_capability >= (8, 0):
        return configuration
    return replace(configuration, code=replace(configuration.code, attends_at_once=False))


def self_attention(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int, *, is_cat: bool = False) -> Tensor:
    """Causal attention over the whole sequence; queries and keys are already rotated.

    The flash kernel lays its result out like q: where that was put together anew (`is_cat`), head by head, so that the
    tokens' order needs a copy.
    """
    variant, values = run.variant, q.numel * v.numel // k.numel
    if variant.kernels.attn is Attention.EAGER:
        return _eager(run, q, k, v, heads, is_cat=is_cat)
    if variant.kernels.attn.is_flash:
        if run.model.model_type in variant.code.families_that_repeat_keys:
            k, v = repeated(run, k, q.numel, heads), repeated(run, v, values, heads)
        output = _flash_attention_2(run, q, k, v, heads, is_cat=is_cat)
        is_cut, is_flat = v.numel != k.numel, variant.has_mask or _flattens(run)
        return ops.copy(run.tape, output) if is_cut or (is_cat and not is_flat) else output
    if not variant.is_by_sample:
        return _torch(run, q, k, v, heads, is_cat=is_cat)
    if _is_at_once(run, q, values, heads):
        output = _flash_attention_2(run, q, k, v, heads, is_cat=is_cat)
        return ops.copy(run.tape, output) if is_cat and not _flattens(run) else output
    return _by_sample(run, q, k, v, heads)


def _is_at_once(run: Context, q: Tensor, values: int, heads: int) -> bool:
    """Whether one kernel attends all samples of packed rows, however long they are.

    Source: dstrain/train/data/isolation.py: is_at_once.
    """
    width = q.numel // (run.rows * heads)
    has_kernel = q.item == 2 and q.numel == values and width <= WIDEST_AT_ONCE and width % ALIGNMENT == 0
    return run.variant.code.attends_at_once and has_kernel and run.variant.batch.seq_len <= AT_ONCE_TOKENS


def _by_sample(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Rows, and then samples, apart and together again; kernels that run one after the other keep no more than one.

    A sample is taken to be as long as the row; a window over it is a mask that goes after the layer.
    Source: dstrain/train/data/isolation.py: by_sample.
    """
    tape = run.tape
    band = tape.new(run.variant.seq_len**2, 1) if run.has_mask else None
    for _ in ("rows", "samples"):
        q, k, v = (ops.split(tape, tensor, (tensor.numel,))[0] for tensor in (q, k, v))
    output = _torch(run, q, k, v, heads, is_cat=False)
    del band
    for _ in ("samples", "rows"):
        output = ops.cat(tape, (output,))
    return output


def _torch(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int, *, is_cat: bool) -> Tensor:
    """PyTorch's scaled dot product attention, which picks a kernel.

    `is_cat`: whether queries were put together anew, which the flash kernel's result is laid out like.
    """
    values = q.numel * v.numel // k.numel
    widths = (q.numel // (run.rows * heads), values // (run.rows * heads))
    if run.has_mask or widths[0] != widths[1] or widths[0] > WIDEST_FLASH_HEAD:
        k, v = repeated(run, k, q.numel, heads), repeated(run, v, values, heads)  # Transformers 5.23 use_gqa_in_sdpa
    elif q.item == 2:
        output = fused(run, q, k, v, run.rows * heads)
        return ops.copy(run.tape, output) if is_cat else output
    alignment = ALIGNMENT * 2 // q.item
    if k.numel != q.numel or any(width % alignment for width in widths):
        return _plain(run, q, k, v, heads)
    return fused(run, q, k, v, run.rows * heads, has_bias=run.has_mask)


def _flash_attention_2(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int, *, is_cat: bool) -> Tensor:
    """The flash_attn package: values narrower than keys are padded and the result cut, rows with padding are unpadded.

    Source: Transformers 5.23 integrations/flash_attention.py: flash_attention_forward.
    """
    tape, narrow, values = run.tape, v.numel, q.numel * v.numel // k.numel
    if v.numel != k.numel:
        v = ops.resized(tape, v, k.numel)
    if run.variant.has_mask:
        output = _unpadded(run, q, k, v, heads, is_cat=is_cat)
    else:
        if is_cat and _flattens(run):
            q = ops.copy(tape, q)
            k = k if k.numel * heads == q.numel else ops.copy(tape, k)
        output = fused(run, q, k, v, run.rows * heads)
    return output if v.numel == narrow else ops.cut(tape, output, values)


def _flattens(run: Context) -> bool:
    """Whether rows are put one behind the other, which copies what lies head by head."""
    return run.variant.batch.packing and run.variant.batch.rows > 1


def _unpadded(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int, *, is_cat: bool) -> Tensor:
    """Tokens without the padding, all of them in the longest rows: copied out, attended, and written into zeros.

    Source: Transformers 5.23 modeling_flash_attention_utils.py: _upad_input, _pad_input.
    """
    tape = run.tape
    places = tape.new(run.rows, ops.INDEX)
    k = ops.picked(tape, ops.copy(tape, k) if is_cat else k, k.numel, places)
    v = ops.picked(tape, v, v.numel, places)
    q = ops.picked(tape, ops.copy(tape, q) if is_cat else q, q.numel, places)
    output = fused(run, q, k, v, run.rows * heads)
    return ops.picked(tape, output, output.numel, places)


def repeated(run: Context, x: Tensor, numel: int, heads: int) -> Tensor:
    """`repeat_kv`: keys or values written out for every query head; one head alone needs no more than a view."""
    if x.numel == numel:
        return x
    return ops.shared(run.tape, x, heads) if x.numel * heads == numel else ops.resized(run.tape, x, numel)


def fused(run: Context, q: Tensor, k: Tensor, v: Tensor, queries: int, *, has_bias: bool = False) -> Tensor:
    """A fused kernel: keeps q, k, v, the output and one fp32 number for each of the heads' `queries`.

    A boolean mask becomes a bias in the training precision, kept in each layer. The backward kernel sums queries'
    gradients in fp32 and, where heads share keys, makes gradients for every head first.
    Source: torch 2.13 ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd;
    mem_eff_attention/kernel_backward.h: workspace_size.
    """
    tape, item, numels = run.tape, q.item, (q.numel, k.numel, v.numel)
    has_workspace = run.variant.kernel_workspaces
    # values may be narrower than keys (MLA), which makes the output as much narrower than the queries
    out_numel = q.numel * v.numel // k.numel
    node = None
    bias = _bias(run, item) if has_bias else None
    out = tape.new(out_numel, item)
    sums = tape.new(queries, ops.FP32)
    if tape.needs(q, k, v):
        saved = tape.save(q, k, v, ops.view_without_node(out), sums, bias)

        def backward(grad: Tensor) -> Tensors:
            kept = saved.take()
            work = []
            if has_workspace:
                work = [tape.new(numels[0], ops.FP32), tape.new(queries, ops.FP32)]
                if numels[1] < numels[0]:
                    work += [tape.new(numels[0], item), tape.new(out_numel, item)]
            grads = tuple(tape.new(numel, item) for numel in numels)
            del kept, work
            return grads

        node = tape.node((q, k, v), backward)
    return Tensor(out.storage, out_numel, item, node)


def _bias(run: Context, item: int) -> Tensor:
    """A boolean mask as numbers to add, its rows padded to what the kernel reads at once.

    Source: torch 2.13 ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, pad_bias.
    """
    batch, length = run.variant.batch.rows, run.variant.seq_len
    bias = run.tape.new(batch * length**2, item)
    if length % ALIGNMENT == 0:
        return bias
    return run.tape.new(batch * length * -(-length // ALIGNMENT) * ALIGNMENT, item)


def _eager(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int, *, is_cat: bool) -> Tensor:
    """Attention with every score written out; the softmax is computed and kept in fp32.

    Source: Transformers 5.23 modeling_llama.py: eager_attention_forward.
    """
    tape, values = run.tape, q.numel * v.numel // k.numel
    keys, many_values = repeated(run, k, q.numel, heads), repeated(run, v, values, heads)
    q = _in_order(run, q, is_copy=is_cat)
    keys = _in_order(run, keys, is_copy=_is_copy(keys, k) or (is_cat and keys.numel == k.numel))
    weights = weighed(run, q, keys, run.rows * heads * run.variant.seq_len, has_mask=True)
    del keys
    many_values = _in_order(run, many_values, is_copy=_is_copy(many_values, v))
    return ops.copy(tape, ops.product(tape, weights, many_values, values))


def weighed(run: Context, q: Tensor, k: Tensor, numel: int, *, has_mask: bool) -> Tensor:
    """The weight of each key for each query, `numel` in all: scores, perhaps masked, and their softmax in fp32."""
    tape, item = run.tape, q.item
    scores = ops.unary(tape, ops.product(tape, q, k, numel))
    if has_mask:
        scores = ops.unary(tape, scores)
    weights = ops.cast(tape, ops.softmax(tape, ops.cast(tape, scores, ops.FP32)), item)
    del scores
    return weights


def _is_copy(x: Tensor, of: Tensor) -> bool:
    return x.storage is not of.storage


def _in_order(run: Context, x: Tensor, *, is_copy: bool) -> Tensor:
    """A copy head by head, where x is not one already and several samples would lie in between."""
    return x if is_copy or run.variant.batch.rows == 1 else ops.copy(run.tape, x)


def _plain(run: Context, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Fallback if no kernel fits: scaled queries and keys, every score written out in the training precision.

    Source: torch 2.13 ATen/native/transformers/attention.cpp: _scaled_dot_product_attention_math.
    """
    tape, item, values = run.tape, q.item, q.numel * v.numel // k.numel
    batch, length = run.variant.batch.rows, run.variant.seq_len
    scaled = ops.unary(tape, q)
    mask = tape.new(length**2 * (batch if run.has_mask else 1), item)
    if k.numel != q.numel:
        k, v = ops.resized(tape, k, q.numel), ops.resized(tape, v, values)
    keys = ops.unary(tape, k)
    scores = ops.product(tape, _in_order(run, scaled, is_copy=False), keys, run.rows * heads * length)
    scores = ops.add(tape, scores, mask)
    weights = ops.softmax(tape, scores)
    del scores
    output = ops.product(tape, weights, v, values)
    del mask
    return ops.copy(tape, output)
