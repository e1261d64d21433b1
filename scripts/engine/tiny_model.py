"""usage: tiny_model.py FOLDER

Called by setup-engine.sh. Writes a small Llama (4 layers, 4 heads, 2 KV heads of size 32, float32: 2,048 B of KV per
token) with weights from a fixed seed, and a byte-level tokenizer with a chat template.

The weights are wider than a trained model's, so that greedy tokens depend on the whole context. Rows of the output layer
without a tokenizer entry are zero, so that every generated id is text. float32: with bf16 the shape of a batch changes
answers, and comparing tokens would prove nothing.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SEED, LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN, MLP, VOCAB, CONTEXT = 20, 4, 4, 2, 32, 128, 256, 512, 131072
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tensors(known: int) -> dict[str, torch.Tensor]:
    """All weights; output rows from `known` on are zero."""
    random = torch.Generator().manual_seed(SEED)

    def normal(rows, columns, width=0.15):
        return torch.randn(rows, columns, generator=random) * width

    out = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, 1.0), "model.norm.weight": torch.ones(HIDDEN)}
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            out[f"{at}{name}.weight"] = normal(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}{norm}.weight"] = torch.ones(HIDDEN)
    out["lm_head.weight"] = normal(VOCAB, HIDDEN)
    out["lm_head.weight"][known:] = 0
    return out


def tokenizer() -> Tokenizer:
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(entries)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tok = tokenizer()
    tok.save(str(folder / "tokenizer.json"))
    tokenizer_config = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False, chat_template=TEMPLATE,
    )  # fmt: skip
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", dtype="float32", torch_dtype="float32", vocab_size=VOCAB,
        hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD, hidden_act="silu", max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5, rope_theta=10000.0, attention_bias=False, tie_word_embeddings=False,
        bos_token_id=tok.token_to_id("<s>"), eos_token_id=tok.token_to_id("</s>"),
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors(tok.get_vocab_size()), str(folder / "model.safetensors"), metadata={"format": "pt"})
    print(f"  {sum(f.stat().st_size for f in folder.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
