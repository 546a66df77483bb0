"""Qwen3, the architecture that the model maker makes.

With `--load-format dummy` SGLang fills weights with tiny numbers, so that the last token alone
decides what comes next, and no wrong key of the cache would show. Here they are drawn as the
model maker's are (`sgl_ext_cpu.model`): attention is sharp, and only words can be sampled.
"""

import torch
from sglang.srt.models.qwen3 import Qwen3ForCausalLM as _Qwen3ForCausalLM
from tokenizers import Tokenizer

from sgl_ext_cpu import gate
from sgl_ext_cpu import tokenizer as text
from sgl_ext_cpu.drawing import draw


class Qwen3ForCausalLM(_Qwen3ForCausalLM):  # type: ignore[misc]  # sglang is untyped
    def post_load_weights(self) -> None:
        """SGLang calls this after it made dummy weights, and not for weights from a file."""
        gate.install()  # on a GPU, where no platform of ours does it
        folder = self.config._name_or_path
        # A rank has a part of the output's rows.
        first = self.lm_head.shard_indices.org_vocab_start_index
        words = text.words(Tokenizer.from_file(f"{folder}/tokenizer.json"))
        words = [word - first for word in words]
        with torch.no_grad():
            for number, (name, weights) in enumerate(self.named_parameters()):
                draw(name, weights, words, seed=number)


EntryClass = Qwen3ForCausalLM
