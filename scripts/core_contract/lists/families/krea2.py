"""What Krea-2's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Passes, ReadsOnly
from scripts.core_contract.lists.transformers import BRIDGE, MODEL
from scripts.core_contract.model_kinds import Detects

KREA2 = "nodes/families/krea2.py"
SINCE, REFERENCES = (0, 27, 0), (0, 33, 0)
"""The first tested releases that have the family, and reference images for it."""

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly(
            "Krea2", "self.diffusion_model", "", by=KREA2, why="the stand-in has none", word="krea2", since=SINCE
        ),
        Mentions(
            "Krea2.extra_conds",
            "ref_latents ref_latents_method",
            by=KREA2,
            why="arguments of a call",
            since=REFERENCES,
        ),
    ),
    *core_module(
        "comfy.supported_models",
        Detects(
            "Krea2",
            {"image_model": "krea2"},
            "Krea2",
            "Wan21",
            "shift multiplier",
            by=KREA2,
            why="Krea-2",
            since=SINCE,
        ),
    ),
    *core_module(
        "comfy.sd",
        Has("CLIPType", "KREA2", by=KREA2, why="the family's text encoder", since=SINCE),
        Mentions(
            "detect_te_model",
            "model.visual.deepstack_merger_list.0.norm.weight",
            by="nodes/remote/clip.py",
            why="how Qwen3-VL is named",
            word="visual.deepstack_merger_list.",
            since=SINCE,
        ),
    ),
    *core_module(
        "comfy.ldm.krea2.model",
        Has("", "SingleStreamDiT", by=KREA2, why="where ComfyUI has it", since=SINCE),
        Calls(
            "SingleStreamDiT(*, device, dtype, operations)",
            by=f"{KREA2} {BRIDGE}",
            why="names and shapes of its weights",
            since=SINCE,
        ),
        Calls(
            "SingleStreamDiT.forward(x, timesteps, context, *, attention_mask, transformer_options)",
            by=f"{KREA2} {BRIDGE} {MODEL}",
            why="the stand-in is called like it",
            word="forward SingleStreamDiT context",
            since=SINCE,
        ),
        Calls(
            "SingleStreamDiT(*, features, channels, patch, layers, heads, kvheads, txtlayers, txtdim, theta, tdim, "
            "txtheads, txtkvheads)",
            by=KREA2,
            why="numbers of the architecture",
            since=SINCE,
        ),
        Calls(
            "SingleStreamDiT._forward(x, timesteps, context, *, ref_latents, **kwargs)",
            by=KREA2,
            why="packs reference images",
            word="_forward ref_latents",
            since=REFERENCES,
        ),
        ReadsOnly(
            "SingleStreamDiT._forward",
            "self",
            "patch tdim channels default_ref_method process_img first tmlp tproj txtfusion txtmlp _unpack_context "
            "pe_embedder blocks last",
            by=KREA2,
            why="a stand-in is self",
            word="patch tdim channels default_ref_method process_img first tmlp tproj txtfusion txtmlp "
            "_unpack_context pe_embedder blocks last",
            since=REFERENCES,
        ),
        ReadsOnly(
            "SingleStreamDiT.process_img",
            "self",
            "patch",
            by=KREA2,
            why="a stand-in is self",
            since=REFERENCES,
            word="patch",
        ),
        Passes(
            "SingleStreamDiT._forward",
            "block(combined, *args, timestep_zero_index=timestep_zero_index, **kwargs)",
            by=KREA2,
            why="references at timestep 0",
            word="timestep_zero_index",
            since=REFERENCES,
        ),
        Passes(
            "SingleStreamDiT._forward",
            "self.pe_embedder(pos)",
            by=KREA2,
            why="a stand-in keeps positions",
            since=REFERENCES,
        ),
    ),
)
