"""Exported planes read by transformers with compressed-tensors, the library whose files vLLM loads."""

import json
import re
from pathlib import Path

import optree
import pytest
import torch
from torch import nn

import fsharp as fs
from fsharp.functional.tree.paths import nested_dicts
from tests.checkpoint.models import logits

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
GROUPS = {  # what the page says to write into config_groups
    name: json.loads(entry)
    for names, entry in re.findall(r"^\| (.+) \| `(\{\"targets\".+\})` \|$", PAGE.read_text(), re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config).eval()


def test_the_page_has_an_entry_for_each_format_of_scales_that_compressed_tensors_knows():
    assert GROUPS.keys() == {
        *(f"{kind}_by_{unit}" for kind in ("float8_e4m3", "int8") for unit in ("tensor", "row")),
        "mxfp8",
        "mxfp4",
    }


@pytest.mark.parametrize("name", GROUPS)
def test_transformers_computes_with_the_values_that_the_planes_encode(tmp_path, name):
    model, comm = make_llama(), fs.connect(fs.Mesh({"dp": 1}))
    linear = [f"{path}.weight" for path, each in model.named_modules() if isinstance(each, nn.Linear) and path != "lm_head"]
    encoded = fs.Precision(main=torch.float32, stored=getattr(fs.formats, name))
    params = nested_dicts({tuple(path.split(".")): p.detach().clone() for path, p in model.named_parameters()})
    precision = {"**": fs.Precision(), **dict.fromkeys(linear, encoded)}
    layout = fs.plan(params, comm.mesh, fs.zero3("dp"), precision=precision)
    state = fs.init_state(fs.optim.sgd(0.1), fs.shard(params, layout, comm, place="optim"), comm=comm)
    saved = fs.checkpoint.save(tmp_path / "root", state.params, step=0, comm=comm, planes=True)

    packed = (lambda path: re.sub("proj.weight$", "proj.weight_packed", path)) if name == "mxfp4" else None
    fs.checkpoint.export_safetensors(saved, tmp_path / "out", rename=packed)
    text = re.search(r"```json\n(\{.+?\})\n```", PAGE.read_text(), re.DOTALL)
    added = json.loads(text[1])
    added["quantization_config"]["config_groups"]["linear"] = GROUPS[name]
    model.config.save_pretrained(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | added))

    back, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    before = logits(model)
    values = fs.full_tree(state.params, comm=comm)
    model.load_state_dict(
        {".".join(path): leaf for path, leaf in zip(optree.tree_paths(values), optree.tree_leaves(values), strict=True)}
    )
    assert torch.equal(logits(back.eval()), logits(model))
    assert not torch.equal(before, logits(model)), "encoded weights are not the weights before"
