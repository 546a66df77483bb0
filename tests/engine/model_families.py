"""A configuration of each model family that SGLang chooses its arguments by: those of published
models, without what only weights are made from."""

from __future__ import annotations

from typing import Any

from tests.sizing.configs import CONFIGS

_MLA = {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
_GATED_DELTA = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_FIVE_WINDOWS_OF_SIX = {
    "num_hidden_layers": 48,
    "hidden_size": 3840,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
}


def _of(kind: str, architecture: str, **facts: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], **facts}


FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": CONFIGS["Qwen3-32B"] | {"model_type": "qwen3"},
    "Qwen3 MoE": CONFIGS["Qwen3-235B-A22B"] | {"model_type": "qwen3_moe"},
    "Qwen3-Next": CONFIGS["Qwen3-Next-80B-A3B"] | {"model_type": "qwen3_next"},
    "Qwen3.5": _of(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        text_config={"model_type": "qwen3_5_moe_text", **_GATED_DELTA},
        vision_config={"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152},
    ),
    "GLM-4.6": CONFIGS["GLM-4.6"] | {"model_type": "glm4_moe"},
    "GLM-4.7-Flash": _of(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        hidden_size=2048,
        num_hidden_layers=47,
        num_attention_heads=20,
        num_key_value_heads=20,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
    ),
    "GLM-5": _of(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        hidden_size=6144,
        num_hidden_layers=78,
        num_attention_heads=64,
        num_key_value_heads=64,
        kv_lora_rank=512,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        index_topk=2048,
        index_head_dim=128,
        index_n_heads=32,
    ),
    "Kimi-K2": CONFIGS["Kimi-K2"] | {"model_type": "kimi_k2", **_MLA},
    "Kimi-Linear": _of(
        "kimi_linear",
        "KimiLinearForCausalLM",
        hidden_size=2304,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=72,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config={
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    ),
    "DeepSeek V3": CONFIGS["DeepSeek-V3.1"] | {"model_type": "deepseek_v3", **_MLA},
    "DeepSeek V3.2": CONFIGS["DeepSeek-V3.2"] | {"model_type": "deepseek_v32", **_MLA},
    "DeepSeek V4": _of(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        num_key_value_heads=1,
        head_dim=512,
        q_lora_rank=1024,
        o_lora_rank=1024,
        o_groups=8,
        qk_rope_head_dim=64,
        index_topk=512,
        index_head_dim=128,
        index_n_heads=64,
        sliding_window=128,
        compress_ratios=[0, 0, *([4, 128] * 20), 4],
    ),
    "gpt-oss": CONFIGS["gpt-oss-120b"] | {"model_type": "gpt_oss"},
    "Llama 3": _of(
        "llama",
        "LlamaForCausalLM",
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Llama 4": _of(
        "llama4",
        "Llama4ForConditionalGeneration",
        text_config={
            "model_type": "llama4_text",
            "hidden_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        vision_config={"model_type": "llama4_vision_model"},
    ),
    "Gemma 3": _of("gemma3_text", "Gemma3ForCausalLM", **_FIVE_WINDOWS_OF_SIX),
    "Gemma 4": _of(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        text_config={"model_type": "gemma4_text", **_FIVE_WINDOWS_OF_SIX},
    ),
    "MiniMax-M2": CONFIGS["MiniMax-M2"] | {"model_type": "minimax_m2"},
}
"""By the name that docs/guide/models.md gives the family."""
