"""What examples of other libraries share: options, small models of transformers, rows of text, and a tokenizer of bytes."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from gpt.data import load, random_starts, windows

LENGTH = 64
logging.disable(logging.WARNING)  # of transformers, accelerate and Lightning, about small models


@dataclass
class Options:
    """Train a small model on the source of Python's standard library."""

    steps: int = 20
    out: Path = Path("runs") / Path(sys.argv[0]).stem


@dataclass
class TwoEpochs(Options):
    """Train a small model on the source of Python's standard library, in two epochs; the second one resumes from the first."""

    def __post_init__(self):
        if self.steps % 2:
            raise SystemExit(
                f"error: --steps is {self.steps}, expected an even number: each of two epochs has half of the steps"
            )


def gpt2():
    """Return a GPT-2 of two layers over bytes, with the same weights in each process."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    tokens = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens, n_positions=LENGTH, **sizes))


def gpt2_and_adamw():
    """Return ``gpt2()``, and AdamW of torch for it: what other libraries train beside fsharp."""
    model = gpt2()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def llama(vocab_size=256, **tokens):
    """Return a Llama of two layers, with the same weights in each process. ``tokens``: options such as ``eos_token_id``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocab_size, **tokens, **sizes))


def rows(count):
    """Return ``count`` windows of the source of Python's standard library: int64 ``[count, 64]``, equal in each process."""
    corpus = load().train
    return windows(corpus, random_starts(corpus, count, LENGTH, seed=0, step=0), LENGTH)["inputs"]


def lines(count):
    """Return ``count`` lines of that source, each of 41 to 79 characters."""
    text = bytes(load().train[:400_000].tolist()).decode(errors="ignore")
    return [line for line in text.split("\n") if 40 < len(line) < 80][:count]


def byte_tokenizer():
    """Return a tokenizer of transformers with one token for each of the 256 bytes, and one for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    whole = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>", pad_token="<end>")
