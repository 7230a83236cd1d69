"""Models of transformers, small and random: two layers, one of KDA and one of attention."""

import contextlib
import importlib
import inspect
import warnings

import torch

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
FUNCTIONS = (
    "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", "causal_conv1d_fn", "causal_conv1d_update",
)
SHARED = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
    v_head_dim=16, num_experts_per_tok=2, pad_token_id=0, eos_token_id=2, max_position_embeddings=256,
)


def module_of(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def config_of(name):
    if name == "kimi_linear":
        from transformers import KimiLinearConfig

        return KimiLinearConfig(
            **SHARED, linear_head_dim=16, linear_num_heads=2, layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["dense", "dense"], num_local_experts=2, bos_token_id=1,
        )
    if name == "bailing_hybrid":
        from transformers.models.bailing_hybrid import BailingHybridConfig

        return BailingHybridConfig(
            **SHARED, head_dim=16, num_local_experts=8, n_group=2, topk_group=1, num_mtp_layers=0,
            layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "dense"],
        )
    from transformers.models.glm5_next import Glm5NextTextConfig

    return Glm5NextTextConfig(
        **SHARED | {"qk_rope_head_dim": 0}, q_lora_rank=16, linear_head_dim=16, linear_num_heads=2,
        n_routed_experts=4, index_topk=64, index_head_dim=16, index_n_heads=2, bos_token_id=1,
        layer_types=["linear_attention", "indexed_attention"], mlp_layer_types=["dense", "dense"],
    )


def layer_of(name, seed=0):
    """transformers' own layer of KDA, with random gates, and its config."""
    module, config = module_of(name), config_of(name)
    kind = {"kimi_linear": "KimiLinearDeltaAttention", "glm5_next": "Glm5NextTextLinearAttention",
            "bailing_hybrid": "BailingHybridDeltaAttention"}[name]
    torch.manual_seed(seed)
    layer = getattr(module, kind)(config, 0)
    with torch.no_grad():
        layer.forget_gate.A_log.normal_()
        layer.forget_gate.dt_bias.normal_()
        layer.o_norm.weight.normal_()
    return layer, config


def model_of(name, dtype=torch.float32, seed=0):
    module, config = module_of(name), config_of(name)
    kind = {"kimi_linear": "KimiLinearForCausalLM", "glm5_next": "Glm5NextTextModel",
            "bailing_hybrid": "BailingHybridForCausalLM"}[name]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(module, kind)(config).to(dtype)


@contextlib.contextmanager
def in_torch(name):
    """The torch code of the model's functions, whatever packages are installed."""
    module = module_of(name)
    old = {function: getattr(module, function) for function in FUNCTIONS}
    for function, wrapped in old.items():
        setattr(module, function, inspect.unwrap(wrapped))
    try:
        yield
    finally:
        for function, wrapped in old.items():
            setattr(module, function, wrapped)


def distance(a, b):
    """Relative, in the norm."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
