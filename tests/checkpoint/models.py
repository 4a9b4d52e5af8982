"""Tiny models of transformers, and trees of their parameters."""

import torch

import fsharp as fs
from fsharp.functional.tree.paths import nested_dicts

MESH = fs.Mesh({"dp": 2})
TOKENS = torch.arange(24).view(2, 12) % 50


def llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM  # here, as ranks import this file

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2(seed=0):
    """Its head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config).eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


def nested(tensors):
    """Tensors by dotted name as a nested tree."""
    return nested_dicts({tuple(name.split(".")): value for name, value in tensors.items()})


def shapes(model, dtype=None):
    """The parameters of a model on the meta device, ties kept."""
    kept = {}
    return nested(
        {
            name: kept.setdefault(id(p), torch.empty(p.shape, dtype=dtype or p.dtype, device="meta"))
            for name, p in model.named_parameters(remove_duplicate=False)
        }
    )


def parameters(model):
    """Parameters by name, of tied ones each name."""
    return dict(model.named_parameters(remove_duplicate=False))


def planned(tree, comm, strategy=None, units=()):
    """Where a tree rests, without values."""
    layout = fs.plan(tree, comm.mesh, strategy or fs.zero3("dp"), units=units)
    return fs.init_params(fs.init.normal(1.0), layout, comm, key=3)


def whole(tree, comm):
    """Tensors by dotted name."""
    import optree

    paths, leaves, _ = optree.tree_flatten_with_path(fs.full_tree(tree, comm=comm))
    return {".".join(map(str, path)): leaf for path, leaf in zip(paths, leaves, strict=True)}
