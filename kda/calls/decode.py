"""`decode_step`: checks, the choice of a backend, one call of it; an operator of its own beneath torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kda.checks.calls import check, dtype_name, number, on_cpu
from kda.checks.decode import FLAGS, KIND, OF_TYPES, RECORDING, VALUES, StepCall, StepOptions
from kda.checks.keywords import names_of, refuse_unknown
from kda.checks.memo import Memo, are_plain, kind_of_call
from kda.model import transforms
from kda.model.force import forced
from kda.model.host import stand_in
from kda.model.problem import Problem, StepInputs, StepProblem, beta_of, gate_of
from kda.routing.dispatch import backend_asked, choose, launcher

from ..errors import InputError, InputTypeError, KdaError
from . import node

Tensor = torch.Tensor


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    ssm_state_indices: Tensor | None = None,
    first_slot: int = 0,
    conv_states: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_channels_first: bool = False,
    norm_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    records: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    accepted_path: Tensor | None = None,
    parents: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor:
    """All that a layer does with a token between its projections, for every running sequence, in one kernel.

    In this order: short convolution with its state and SiLU, l2norm of q and k, gate, beta, the recurrence, gated
    RMSNorm. Without `conv_weight` q, k and v are used as they are, without `norm_weight` o is returned as the
    recurrence gives it, and three flags leave out the l2norm, the gate and beta's sigmoid. Nothing waits for the GPU,
    so the call may be captured in a CUDA graph and replayed with other numbers in every tensor.

    The state is rounded to the dtype of the pool after each token, so that a pool holds the same bits whether tokens
    come one by one, together, or as drafts that are accepted later.

    Args:
        q, k: (N, T, H, K), T tokens of each of N sequences, before the convolution.
        v: (N, T, HV, V), HV a multiple of H.
        g: (N, T, HV, K), logits of the gate, or natural-log decays with `use_gate_in_kernel=False`; (N, T, HV): one for
            all channels of a head, as in `chunk_kda`.
        beta: (N, T, HV), logits, or step sizes with `use_beta_sigmoid_in_kernel=False`.
        states: (slots, HV, V, K) of any float dtype, updated in place; (slots, HV, K, V) with `state_v_first=False`,
            which is slower on a GPU.
        A_log, dt_bias, scale, lower_bound: as in `chunk_kda`.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel: as in `chunk_kda`, but True by default.
        allow_neg_eigval: as in `chunk_kda`.
        ssm_state_indices: (N,), the slot of each sequence in `states`, `conv_states` and `records`; None: slot n. A
            sequence whose slot is below `first_slot` is padding: its o is zero and nothing of it is stored.
        first_slot: 0, or 1 where slot 0 belongs to no sequence, as in vLLM.
        conv_states: (slots, L, C), updated in place: the last L = W - 1 inputs of the convolution, the oldest first;
            C = 2 H K + HV V channels, those of q, k and v. With `records` L = W - 2 + T.
        conv_weight: (C, W) or (C, 1, W), 2 <= W <= 8, the weights of q, k and v, concatenated.
        conv_bias: (C,).
        conv_channels_first: `conv_states` are (slots, C, L).
        norm_gate: (N, T, HV, V), logits: the result is `norm_weight * RMSNorm(o) * sigmoid(norm_gate)`.
        norm_weight: (V,).
        norm_eps: of the RMSNorm.
        records: (slots, T - 1, HV, 2 K + V) float32, updated in place: the tokens of each sequence after its first one
            are drafts. Not their states are kept but a record of each update, and the next call applies those of the
            accepted tokens to the state. Without records all T tokens are final.
        num_accepted_tokens: (N,), with `records`: how many tokens of the last call were accepted, from 1 to T; 1 after
            a prefill, whose state and last W - 1 inputs (the first rows of `conv_states`) are current.
        accepted_path: (N, T), the numbers that these tokens had in that call: 0, then ascending; None: 0, 1, 2, ...
        parents: (N, T), the number of the token that each token follows, an earlier one, for drafts in a tree; that of
            the first is not read. None: each follows the one before. A token that follows the one before costs less.
        out: (N, T, HV, V), o is written there.
        backend: a backend's name, as in `chunk_kda`.

    Returns:
        o (N, T, HV, V) in the dtype of q.

    Raises:
        InputError: an argument is invalid for every backend, or the call records gradients: there is no
            backward. Slots, counts, paths and parents on a GPU are not looked at; whatever they are, no memory outside
            of the tensors is touched.
        NoBackendError: no backend accepts the call, or the named one does not.

    Example:
        >>> N, H, K, V, W = 3, 2, 16, 16, 4
        >>> q, k, v, g = torch.randn(4, N, 1, H, K).unbind()                   # one token for each of three sequences
        >>> states = torch.zeros(8, H, V, K)                                   # eight slots
        >>> conv_states = torch.zeros(8, W - 1, 3 * H * K)
        >>> o = decode_step(
        ...     q, k, v, g, torch.randn(N, 1, H), states, A_log=torch.zeros(H),
        ...     ssm_state_indices=torch.tensor([5, 2, -1]),                    # the last sequence is padding
        ...     conv_states=conv_states, conv_weight=torch.randn(3 * H * K, W),
        ...     norm_gate=torch.randn(N, 1, H, V), norm_weight=torch.ones(V),
        ... )
        >>> o.shape, (o[2] == 0).all().item(), states[5].any().item(), states[0].any().item()
        (torch.Size([3, 1, 2, 16]), True, True, False)
    """
    if unknown:
        refuse_unknown("decode_step", unknown, _KNOWN)
    if isinstance(conv_weight, Tensor) and conv_weight.dim() == 3 and conv_weight.shape[1] == 1:
        conv_weight = conv_weight.squeeze(1)
    if not state_v_first and isinstance(states, Tensor) and states.dim() > 1:
        states = states.mT
    if type(conv_channels_first) is not bool:
        _refuse_flag("conv_channels_first", conv_channels_first)
    if conv_channels_first and isinstance(conv_states, Tensor) and conv_states.dim() > 1:
        conv_states = conv_states.mT
    if scale is None:
        scale = float(q.shape[-1]) ** -0.5 if isinstance(q, Tensor) and q.dim() and q.shape[-1] else 1.0
    x = StepInputs(q, k, v, g, beta, states, A_log, dt_bias, ssm_state_indices, conv_states, conv_weight, conv_bias,
                   norm_gate, norm_weight, records, num_accepted_tokens, accepted_path, parents, out)
    options = StepOptions(
        number(scale), number(lower_bound), use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, number(norm_eps), number(first_slot), state_v_first, backend,
    )
    if out is None and isinstance(q, Tensor) and isinstance(v, Tensor) and q.dim() == v.dim() == 4:
        x = x._replace(out=q.new_empty(*q.shape[:2], *v.shape[2:]))
    if torch.compiler.is_compiling() or _watched():
        if not torch.compiler.is_compiling():
            _refuse_transforms()
        torch.ops.kda.decode_step_(*x, *options)
    else:
        _run_or_explain(StepCall(x, options))
    return x.out if out is None else out


_KNOWN = names_of(decode_step)
NO_VMAP = (
    "decode_step: torch.func.vmap was requested; its calls would write into the same states. Its first axis is one of "
    "sequences: put them together there, each with a slot of its own."
)


NO_TANGENT = (
    "decode_step: forward-mode AD was requested, of a function that writes its states; it has no derivative. Use "
    "kda.chunk_kda, whose outputs and states have one."
)


def _refuse_transforms() -> None:
    top = torch._C._functorch.peek_interpreter_stack()
    if top is not None and top.key() == torch._C._functorch.TransformType.Vmap:
        raise KdaError(NO_VMAP)
    if transforms.tangents():
        raise KdaError(NO_TANGENT)


def _watched() -> bool:
    """Whether a mode or a transform has to see the call."""
    return bool(torch._C._len_torch_dispatch_stack()) or transforms.active()


def _run_or_explain(c: StepCall) -> None:
    try:
        _run(c)
    except Exception:
        check(c, OF_TYPES)                                                     # a remembered kind of call skips these
        raise


def _run(c: StepCall) -> None:
    requested = backend_asked(c.options.backend)
    key = _key(c, requested)
    launch = None if key is None else _LAUNCHES.get(key)
    if launch is None:
        launch = _launch_of(_checked(c), c.x, requested)
        if key is not None:
            _LAUNCHES.remember(key, launch)
    elif any(map(on_cpu, (c.x.slots, c.x.accepted, c.x.path, c.x.parents))):
        check(c, VALUES)                                                       # they may be others
    launch(c.x)
    written = (c.x.states, c.x.conv_states, c.x.records, c.x.out)
    torch.autograd.graph.increment_version([t for t in written if t is not None and not t.is_inference()])


def _launch_of(step: StepProblem, x: StepInputs, requested: str) -> Callable[[StepInputs], None]:
    """Return what runs a checked call, and others whose tensors lie as its tensors do."""
    module = launcher(choose(step.core, requested).backend)
    if not step.core.N:
        return lambda x: None
    ready = None
    if hasattr(module, "decode_launch"):
        node.start()
        ready = module.decode_launch(step, x)
    return ready or functools.partial(module.decode_step, step)


def _key(c: StepCall, requested: str) -> tuple | None:
    """Return a key by all that launches depend on and that checks look at, but numbers on the CPU; None if there is
    none: a tensor is not plain, or shares memory with another."""
    layouts = node.layouts(tuple(c.x))
    return layouts and (layouts, c.options, *map(type, c.options), requested, stand_in(), forced())


_LAUNCHES: Memo[Callable[[StepInputs], None]] = Memo()
_PROBLEMS: Memo[StepProblem] = Memo()


def _checked(c: StepCall) -> StepProblem:
    """Return the checked call without its tensors; a remembered kind of call costs one look-up and the VALUES."""
    if not are_plain(map(type, c.x)):
        _check_kinds(c)
    try:
        key = kind_of_call(c.x, *map(type, c.options), c.options, forced())
        step = _PROBLEMS.get(key)
    except (AttributeError, TypeError):                                        # a value is no tensor, or has no hash
        check(c, OF_TYPES)
        raise
    if step is None:
        _check_kinds(c)
        check(c, KIND)
        step = _PROBLEMS.remember(key, _described(c))
    check(c, (RECORDING,) if torch.is_grad_enabled() else ())
    check(c, VALUES)
    return step


def _check_kinds(c: StepCall) -> None:
    check(c, OF_TYPES)
    for name in FLAGS:
        if not isinstance(flag := getattr(c.options, name), bool):
            _refuse_flag(name, flag)
    if "DTensor" in [type(x).__name__ for x in c.x]:
        raise InputError(c.op, "q", "given without DTensors", "a DTensor", "Pass x.to_local() of each tensor.",
                         "decode.mesh")


def _refuse_flag(name: str, flag: Any) -> NoReturn:
    raise InputTypeError("decode_step", name, "True or False", f"{type(flag).__name__} {flag!r:.60}", "Pass a bool.",
                         "decode.flag.type")


def _described(c: StepCall) -> StepProblem:
    x, o = c.x, c.options
    core = Problem(
        op="decode", device=str(x.q.device), B=c.N, T=c.T, N=c.N, H=c.H, HV=c.HV, K=c.K, V=c.V,
        dtype=dtype_name(x.q), g_dtype=dtype_name(x.g), beta_dtype=dtype_name(x.beta),
        state_dtype=dtype_name(x.states), lower_bound=None if o.lower_bound is None else float(o.lower_bound),
        gate=gate_of(o.use_gate_in_kernel, o.lower_bound),
        gate_per_head=c.gate_per_head, A_log=x.A_log is not None, dt_bias=x.dt_bias is not None,
        beta=beta_of(o.use_beta_sigmoid_in_kernel, o.allow_neg_eigval),
        qk_l2norm=o.use_qk_l2norm_in_kernel, scale=float(o.scale), state_v_first=True, inplace=True,
        slots=c.slots, accepted_tokens=x.accepted is not None,
    )
    return StepProblem(
        core, width=c.W, norm_eps=None if x.norm_weight is None else float(o.norm_eps), first_slot=o.first_slot,
        drafts=x.records is not None, tree=x.parents is not None,
    )


# beneath torch.compile


def _schema() -> str:
    written = {"states": "Tensor(a!)", "conv_states": "Tensor(b!)?", "records": "Tensor(c!)?", "out": "Tensor(d!)"}
    needed = dict.fromkeys(StepInputs._fields[:5], "Tensor")
    tensors = [f"{(written | needed).get(name, 'Tensor?')} {name}" for name in StepInputs._fields]
    kinds = {"scale": "float", "lower_bound": "float?", "norm_eps": "float", "first_slot": "int", "backend": "str?"}
    options = [f"{kinds.get(name, 'bool')} {name}" for name in StepOptions._fields]
    return f"({', '.join([*tensors, *options])}) -> ()"


def _call_of(args: tuple) -> StepCall:
    return StepCall(StepInputs(*args[: len(StepInputs._fields)]), StepOptions(*args[len(StepInputs._fields):]))


def _operator(*args: Any) -> None:
    _run(_call_of(args))


def _operator_fake(*args: Any) -> None:
    check(_call_of(args), KIND)


def _operator_autograd(*args: Any) -> None:
    check(_call_of(args), (RECORDING,))
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.kda.decode_step_(*args)


transforms.register(f"decode_step_{_schema()}", "decode_step", _operator, _operator_fake, autograd=_operator_autograd)
