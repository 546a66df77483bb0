"""Qwen3, the architecture that the model maker makes."""

from sglang.srt.models.qwen3 import Qwen3ForCausalLM

EntryClass = Qwen3ForCausalLM
