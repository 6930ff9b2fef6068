"""The fields of its config by which the library knows GLM-5."""

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "n_routed_experts": 256,
    "index_topk": 2048,
}
