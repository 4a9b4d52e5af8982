"""Train a Mixtral of transformers with expert parallelism beside ZeRO-3, as the unsharded one is trained.

python examples/train_mixtral.py                                  four processes: two of them for each half of the experts
torchrun --nproc-per-node 8 examples/train_mixtral.py --ep 4      each quarter

Dense units are sharded over all ranks. Each rank along "ep" has its own experts, which are sharded over "dp" alone.

It prints the losses of both runs. They differ by rounding only, about 1e-6.
"""

import os
from dataclasses import dataclass

import launch_example
import torch
from gpt.data import load, random_starts, windows
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralExperts

import fsharp as fs

BATCH, LENGTH, LR = 16, 64, 2e-3  # sequences of all ranks in a step, bytes in each of them
CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=None,
    use_cache=False,
)


@dataclass
class Options:
    """Train a Mixtral of 0.7M parameters on the source of Python's standard library, sharded and unsharded."""

    steps: int = 30
    """Steps of the optimizer."""
    ep: int = 2
    """Ranks among which experts are divided; it divides their number, and that of the processes."""


class OwnExperts(nn.Module):
    """Each rank gets all tokens along "ep", computes its own experts, and the results are summed."""

    def __init__(self, experts, comm):
        super().__init__()
        self.comm, n = comm, comm.mesh.axis_size("ep")
        self.count = experts.num_experts = experts.num_experts // n
        self.first = self.count * comm.mesh.coord("ep", comm.rank)
        for name, whole in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, nn.Parameter(whole.detach()[self.first : self.first + self.count].clone()))
        experts._is_expert_parallel = True  # tokens for none of them are expected: their rows are zero, and not undefined
        self.own = experts

    def forward(self, tokens, chosen, weights):
        width = tokens.shape[1]
        everyone = fs.collectives.all_gather_last(torch.cat([tokens, weights], dim=1).T, self.comm, "ep").T
        chosen = self.comm.all_gather(chosen, "ep").flatten(0, 1) - self.first
        chosen = torch.where((chosen < 0) | (chosen >= self.count), self.count, chosen)  # which stands for none
        out = self.own(everyone[:, :width].contiguous(), chosen, everyone[:, width:])
        return fs.collectives.reduce_scatter_last(out.T, self.comm, "ep").T


def build():
    torch.manual_seed(0)
    return MixtralForCausalLM(CONFIG)


def train(model, optimizer, batches, clip):
    rows = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        rows.append(torch.stack([loss.detach(), clip(1.0)]))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(rows)


def train_unsharded(batches):
    model = build().to(batches[0].device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rows = train(model, optimizer, batches, lambda value: clip_grad_norm_(model.parameters(), value))
    return rows, model


def whole_weights(model):
    """Names and weights of the unsharded model, experts of all ranks put together; every rank iterates."""
    for name, value in model.named_full_parameters():
        if ".own." in name:
            yield name.replace(".own.", "."), model.comm.all_gather(value, "ep").flatten(0, 1)
        else:
            yield name, value


def main(options):
    comm = fs.connect(fs.Mesh({"dp": int(os.environ["WORLD_SIZE"]) // options.ep, "ep": options.ep}))
    model = build().to(comm.device)
    for layer in model.model.layers:
        layer.mlp.experts = OwnExperts(layer.mlp.experts, comm)
    dense, sparse = fs.zero3("dp", "ep"), fs.zero3("dp").varying("ep")
    model = fs.shard_module(
        model, mesh=comm, strategy={"**": dense, "**.own": sparse}, units=[MixtralDecoderLayer, MixtralExperts]
    )
    optimizer = fs.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    rank, size = comm.rank, comm.mesh.size
    if rank == 0:
        print(model.layout)

    corpus = load()
    starts = [random_starts(corpus.train, BATCH, LENGTH, seed=0, step=step) for step in range(options.steps)]
    batches = [windows(corpus.train, each, LENGTH)["inputs"].to(comm.device) for each in starts]
    sharded = train(model, optimizer, [tokens[rank::size] for tokens in batches], model.clip_grad_norm_)
    for axis in comm.mesh.names:
        sharded = fs.collectives.all_reduce(sharded, comm, axis)
    sharded /= size  # the norm is the same on all ranks
    weights = dict(whole_weights(model))
    if rank == 0:
        unsharded, other = train_unsharded(batches)
        launch_example.show_losses(sharded[:, 0], unsharded[:, 0], "unsharded")
        loss, norm = (sharded - unsharded).abs().max(0).values
        print(f"largest difference between losses: {loss:.1e}, between gradient norms: {norm:.1e}")
        apart = max((weights[name] - value).abs().max() for name, value in other.named_parameters())
        print(f"largest difference between {len(weights)} trained weights: {apart:.1e}")


if __name__ == "__main__":
    launch_example.main(main, Options, nproc=4, batch=BATCH)
