"""Checkpoints, each of which loads under any strategy, mesh and number of ranks, with the same bits.

- To save: save; Saver, in the background; Replicas, in memory of hosts, and RefreshNbytes, the bytes of a save there.
- To load: load, also files of Hugging Face and of torch.save.
- Values that differ between ranks: PerRank, ModuleWithPerRankBuffers.
- To look at checkpoints without ranks: list_checkpoints, latest, open_checkpoint, verify, prune; Checkpoint.
- Other libraries: export_safetensors, export_torch, from_huggingface, from_dcp, to_dcp; ``fsharp.interop.orbax``.

``help(fs.checkpoint.load)`` describes one of them.
"""

from fsharp.checkpoint.catalog import (
    Checkpoint as Checkpoint,
    latest as latest,
    list_checkpoints as list_checkpoints,
    open_checkpoint as open_checkpoint,
    verify as verify,
)
from fsharp.checkpoint.entries import ModuleWithPerRankBuffers as ModuleWithPerRankBuffers, PerRank as PerRank
from fsharp.checkpoint.formats.conversion import from_huggingface as from_huggingface
from fsharp.checkpoint.formats.dcp import from_dcp as from_dcp, to_dcp as to_dcp
from fsharp.checkpoint.formats.exporting import export_safetensors as export_safetensors, export_torch as export_torch
from fsharp.checkpoint.loading import load as load
from fsharp.checkpoint.replicas import RefreshNbytes as RefreshNbytes, Replicas as Replicas
from fsharp.checkpoint.retention import prune as prune
from fsharp.checkpoint.saver import Saver as Saver
from fsharp.checkpoint.saving import save as save
