"""chunk_gated_delta_rule: the public op. bound.py checks and runs it, in autograd.py (torch) or fused_grad.py."""

from __future__ import annotations

import torch

from flashqla_cp.bound import Options, bind
from flashqla_cp.parallel.context import CPContext
from flashqla_cp.parallel.plan import offsets_to_read
from flashqla_cp.traced import traced_rule


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cp_context: CPContext | None = None,
    backend: str = "auto",
    deterministic: bool = True,
    recompute: str = "none",
    forget_below: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule over documents, on one device or sharded over ranks.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

    Per value head; value head i uses query/key head i // (HV // H). Formula: Gated Delta Networks, arXiv 2412.06464.
    Differentiable once in every tensor argument; a backward with create_graph=True raises RuntimeError.

    Args:
        q, k: [B, T, H, K] in bf16, fp16, fp32 or fp64, one dtype with v. Any tensor may be an
            array of another library (__dlpack__) or a DLPack capsule.
        v: [B, T, HV, V], HV a multiple of H.
        g: [B, T, HV] log gate <= 0, any float dtype; the raw gate input a with use_gate_in_kernel.
        beta: [B, T, HV] write strength in [0, 1] (or [0, 2]); its logit with use_beta_sigmoid_in_kernel.
        scale: factor of the output, K**-0.5 if None.
        initial_state: [N, HV, K, V] state in front of each document, zero if None. N counts the documents: B without
            cu_seqlens, and the documents of the whole stream with cp_context, where the row of a document is read by
            the owner of its first token only and has a zero gradient elsewhere.
        output_final_state: return the states behind the documents. With cp_context a row is filled by the owner of
            the document's last token and 0 elsewhere. The state of an empty document passes through.
        use_qk_l2norm_in_kernel: normalise q and k per head, x * rsqrt(sum(x^2) + 1e-6).
        cu_seqlens: [N+1] offsets of documents packed in one row (B = 1), any integer dtype. Rows past the last offset
            are padding: whatever they hold, their outputs and gradients are exactly 0.
        cu_seqlens_cpu: the same on the CPU, read in the place of cu_seqlens, of which only dtype, shape and length are
            looked at then (its values too if it is on the CPU itself). Pass it to the torch backend, which it saves a
            copy from the device. Kernels read offsets on the device. Given cu_seqlens there alone, they use it where
            it is, its values unchecked; given this one, the host checks it and uploads it in each call, unless one
            document fills the row. So with kernels and offsets on the GPU leave it out: always in the capture of a CUDA
            graph, which refuses the upload.
        state_v_first: states are [N, HV, V, K].
        use_gate_in_kernel: g = -exp(A_log) * softplus(g + dt_bias) with A_log, dt_bias [HV].
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta), doubled with allow_neg_eigval.
        cp_context: from build_cp_context; the tensors then hold this rank's local_tokens rows, B = 1.
        backend: "auto", "tilelang" or "torch". Kernels read q, k and v in place, views of one projection included.
        deterministic: bitwise equal results run to run; the torch backend always is. On kernels, long streams are cut
            in other places where no gradients are wanted, which changes roundings of o.
        recompute: what the backward computes again instead of keeping it, with the same gradients bit for bit:
            "none"; "solve" (gates and the chunks' inverses, most of what is kept); "forward" (everything but the
            last stage: nothing is kept but the arguments). With cp_context the same on every rank, since "forward"
            sends the forward's maps again.
        forget_below: a head whose state comes through a run of tokens with a factor of less is taken to have forgotten
            it there. Kernels then skip that state, and of the run all that is forgotten behind it, so what is left
            out of a state is at most this share of the states in front. 2**-24 if None, which is fp32 rounding; 0
            skips nothing. The torch backend skips nothing.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final states, fp32 (fp64 for fp64 inputs), or None.

    Raises:
        TypeError, ValueError: a bad argument; the text names it. NotImplementedError: no kernel for it, with what
        would work. RuntimeError: backend="auto" in training on a GPU without kernels.
    """
    given = q, k, v, g, beta, A_log, dt_bias, initial_state
    options = Options(
        scale=scale,
        final=output_final_state,
        l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        sigmoid=use_beta_sigmoid_in_kernel,
        double=allow_neg_eigval,
        backend=backend,
        recompute=recompute,
        forget_below=forget_below,
        gate=use_gate_in_kernel,
    )
    if torch.compiler.is_compiling():
        return traced_rule(given, options, offsets_to_read(cu_seqlens, cu_seqlens_cpu)[0], cp_context)
    return bind(given, options, cu_seqlens, cu_seqlens_cpu, cp_context).run()
