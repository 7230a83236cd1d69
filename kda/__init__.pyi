"""What type checkers read of `import kda`; `python tests/helpers/stub.py --write` writes it."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import hf as hf
from . import nn as nn
from . import parallel as parallel
from . import simulator as simulator
from .calls.rehearsal import Explanation as Explanation
from .errors import InputError as InputError
from .errors import InputTypeError as InputTypeError
from .errors import KdaError as KdaError
from .errors import NoBackendError as NoBackendError
from .errors import PackageError as PackageError
from .model.bundles import Grads as Grads
from .model.bundles import Kept as Kept
from .model.bundles import Saved as Saved
from .model.problem import Problem as Problem
from .routing.dispatch import Choice as Choice
from .routing.dispatch import use_backend as use_backend

__version__: str
__all__ = [
    "Choice", "Explanation", "Grads", "InputError", "InputTypeError", "KdaError", "Kept", "NoBackendError", "Outputs",
    "PackageError", "Problem", "Saved", "__version__", "chunk_kda", "chunk_kda_bwd", "chunk_kda_fwd", "decode_step",
    "explain", "fused_kda_gate", "fused_recurrent_kda", "fused_recurrent_kda_fwd", "use_backend",
]

class Outputs(NamedTuple):
    o: Tensor
    final_state: Tensor | None
    h: Tensor | None
    saved: Kept | None

@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, *, output_final_state: Literal[True], use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool | str = False,
    return_intermediate_states: Literal[True], state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
    backend: str | None = None, batch_invariant: bool = False, transpose_state_layout: bool | None = None,
    ssm_state_indices: Tensor | None = None, initial_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None, checkpoint_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...

@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, *, output_final_state: Literal[True], use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool | str = False,
    return_intermediate_states: Literal[False] = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
    backend: str | None = None, batch_invariant: bool = False, transpose_state_layout: bool | None = None,
    ssm_state_indices: Tensor | None = None, initial_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None, checkpoint_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...

@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool | str = False, *,
    return_intermediate_states: Literal[True], state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64,
    backend: str | None = None, batch_invariant: bool = False, transpose_state_layout: bool | None = None,
    ssm_state_indices: Tensor | None = None, initial_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None, checkpoint_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]: ...

@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool | str = False,
    return_intermediate_states: Literal[False] = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64, backend: str | None = None, batch_invariant: bool = False,
    transpose_state_layout: bool | None = None, ssm_state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]: ...

@overload
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool | str = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int = 64, backend: str | None = None, batch_invariant: bool = False,
    transpose_state_layout: bool | None = None, ssm_state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]: ...

def chunk_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool | str = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, use_graph: bool = False, max_num_seqs: int | None = None, *,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, chunk_size: int = 64, backend: str | None = None,
    batch_invariant: bool = False, transpose_state_layout: bool | None = None, ssm_state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
) -> Outputs: ...

def chunk_kda_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor | None, dht: Tensor | None = None,
    saved: Kept | None = None, *, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, safe_gate: bool = False,
    lower_bound: float | None = None, disable_recompute: bool | str = False, return_intermediate_states: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    use_graph: bool = False, max_num_seqs: int | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, backend: str | None = None, batch_invariant: bool = False,
    transpose_state_layout: bool | None = None, ssm_state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
) -> Grads: ...

@overload
def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None, *,
    output_final_state: Literal[True], use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    inplace_final_state: bool | None = None, out: Tensor | None = None, backend: str | None = None,
    batch_invariant: bool = False, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor]: ...

@overload
def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, *, cu_seqlens_cpu: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    inplace_final_state: bool | None = None, out: Tensor | None = None, backend: str | None = None,
    batch_invariant: bool = False, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]: ...

@overload
def fused_recurrent_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_state: Tensor | None = None, scale: float | None = None, *,
    output_final_state: Literal[True], inplace_final_state: bool = True, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    out: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, backend: str | None = None,
    batch_invariant: bool = False, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor]: ...

@overload
def fused_recurrent_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_state: Tensor | None = None, scale: float | None = None,
    output_final_state: bool = False, inplace_final_state: bool = True, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    out: Tensor | None = None, *, cu_seqlens_cpu: Tensor | None = None, backend: str | None = None,
    batch_invariant: bool = False, transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]: ...

def fused_kda_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor: ...

def decode_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, *, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True, use_gate_in_kernel: bool = True, use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False, state_v_first: bool = True, ssm_state_indices: Tensor | None = None,
    first_slot: int = 0, conv_states: Tensor | None = None, conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None, conv_channels_first: bool = False, norm_gate: Tensor | None = None,
    norm_weight: Tensor | None = None, norm_eps: float = 1e-05, records: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, accepted_path: Tensor | None = None, parents: Tensor | None = None,
    out: Tensor | None = None, backend: str | None = None,
) -> Tensor: ...

def explain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool | str = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: Any = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, arch: str | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, backend: str | None = None, batch_invariant: bool = False,
    transpose_state_layout: bool | None = None, ssm_state_indices: Tensor | None = None,
    initial_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
) -> Explanation: ...
