"""Names of other libraries that they do not promise to keep: each is here, and is as we use it, in this version."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed

from parallel_backend.machines.ranks import crossing_bytes
from tests.support import private_names

ROOT = Path(__file__).parents[2]
FILES = [file for folder in ("parallel_backend", "nodes") for file in sorted((ROOT / folder).rglob("*.py"))]
COLLECTIVES = "parallel_backend/distributed/collectives.py"
GGUF = "parallel_backend/checkpoint/gguf_file.py"
KERNELS, OPERATORS = (f"parallel_backend/attention/{name}.py" for name in ("kernels", "torch_operators"))
STAND_INS = "nodes/remote/stand_in_layers.py"
STOCK = "lab/verify/vae/stock.py"
MINIMAX_H3 = "parallel_backend/families/minimax_h3/module.py"
OPEN_SORA1 = "parallel_backend/families/open_sora1/module.py"
OPEN_SORA2 = "parallel_backend/families/open_sora2/module.py"
MINIMAX_H3_VAE = "parallel_backend/vaes/minimax_h3_module.py"
OPEN_SORA_VAE = "parallel_backend/vaes/open_sora1_module.py"
LTX_VAE = "parallel_backend/vaes/ltx_module.py"


@dataclass(frozen=True)
class Use:
    """A name, and how it is used.

    Attributes:
        name: where it is; a part that ends with ``()`` is called.
        by: the files that use it, with spaces between them.
        takes: what is given to it: ``a, b, *, c`` are two by position and one by name. "" if it is not called.
        overridden: whether ours takes its place, so that it may take nothing else.
    """

    name: str
    by: str
    takes: str = ""
    overridden: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def installed(self) -> str:
        """The library and its version."""
        library = self.name.partition(".")[0]
        return f"{library} {importlib.metadata.version(library)}"


WORK = "parallel_backend/planner/work.py"
BYTES = "parallel_backend/distributed/sent_bytes.py parallel_backend/machines/ranks/crossing_bytes.py"
CONVERTERS = tuple(
    Use(f"diffusers.loaders.single_file_utils.{name}", file.relative_to(ROOT).as_posix(), "checkpoint")
    for file in FILES
    for name in re.findall(r'"(convert_\w+)"', file.read_text(encoding="utf-8"))
)
"""diffusers' converters of the families."""
USES = (
    Use("diffusers.loaders.single_file_utils",
        "parallel_backend/families/architecture.py parallel_backend/families/minimax_h3/files.py"),
    *CONVERTERS,
    Use("diffusers.configuration_utils.register_to_config", f"{MINIMAX_H3} {OPEN_SORA1} {OPEN_SORA2} {OPEN_SORA_VAE}",
        "init"),
    Use("diffusers.models.embeddings.get_timestep_embedding", OPEN_SORA1,
        "timesteps, embedding_dim, *, flip_sin_to_cos, downscale_freq_shift"),
    Use("diffusers.models.embeddings.apply_rotary_emb", OPEN_SORA2,
        "x, freqs_cis, *, use_real_unbind_dim, sequence_dim"),
    Use("diffusers.models.transformers.transformer_minimax_h3.MINIMAX_H3_MODALITY_NUM", MINIMAX_H3),
    Use("diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3Attention.forward", MINIMAX_H3,
        "hidden_states, rotary_emb, attention_mask", overridden=True),
    Use("diffusers.models.transformers.transformer_flux.FluxAttnProcessor", OPEN_SORA2, ""),
    Use("diffusers.models.transformers.transformer_flux.FluxPosEmbed", OPEN_SORA2, "*, theta, axes_dim"),
    Use("diffusers.models.transformers.transformer_ltx2.LTX2PerturbedAttnProcessor",
        "parallel_backend/families/ltx2/layer.py", ""),
    Use("diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideoUpsampler3d", LTX_VAE,
        "*, in_channels, stride, is_causal, residual, upscale_factor"),
    Use("torch.Tensor._base", "nodes/remote/digests.py"),
    Use("torch._dynamo", "parallel_backend/loading/compiled_blocks.py"),
    Use("torch._inductor.config.compile_threads", "parallel_backend/rank/spare.py"),
    Use("torch._dynamo.callback.callback_handler", "parallel_backend/loading/compiled_blocks.py"),
    Use("torch.distributed.distributed_c10d._resolve_process_group", BYTES),
    Use("torch.distributed.distributed_c10d._resolve_process_group", "parallel_backend/operators.py"),
    Use("torch.distributed.ProcessGroup._start_coalescing", COLLECTIVES),
    Use("torch.distributed.ProcessGroup._end_coalescing", COLLECTIVES),
    Use("torch.nn.Module._apply", "parallel_backend/loading/partial.py", "fn"),
    Use("torch.nn.Module()._buffers", STAND_INS),
    Use("torch.nn.Module()._forward_hooks", "nodes/remote/added_to_steps.py"),
    Use("torch.nn.Module()._forward_pre_hooks", "nodes/remote/added_to_steps.py"),
    Use("torch.nn.Module()._modules", "nodes/remote/transformer.py"),
    Use("torch.nn.Module()._parameters", STAND_INS),
    Use("torch.ops.aten._fused_sdp_choice", OPERATORS, "query, key, value, *, scale, enable_gqa"),
    Use("torch.ops.aten._scaled_dot_product_cudnn_attention", OPERATORS,
        "query, key, value, attn_bias, *, compute_log_sumexp, scale"),
    Use("torch.ops.aten._scaled_dot_product_efficient_attention", OPERATORS,
        "query, key, value, attn_bias, *, compute_log_sumexp, scale"),
    Use("torch.ops.aten._scaled_dot_product_flash_attention", OPERATORS, "query, key, value, *, scale"),
    Use("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", KERNELS, "query, key, value, *, scale"),
    Use("torch.utils._python_dispatch.TorchDispatchMode", f"{BYTES} {WORK}"),
    Use("torch.utils._python_dispatch.TorchDispatchMode.__torch_dispatch__", f"{BYTES} {WORK}",
        "func, types, args, kwargs", overridden=True),
    Use("diffusers.AutoencoderKLMiniMaxH3._decode_clip", STOCK, "z"),
    Use("diffusers.Flux2Pipeline._patchify_latents", STOCK, "latents"),
    Use("diffusers.Flux2Pipeline._unpatchify_latents", STOCK, "latents"),
    Use("diffusers.LTXPipeline._denormalize_latents", STOCK, "latents, latents_mean, latents_std"),
    Use("diffusers.LTXPipeline._normalize_latents", STOCK, "latents, latents_mean, latents_std"),
    Use("diffusers.ModelMixin._keep_in_fp32_modules",
        f"parallel_backend/loading/partial.py {MINIMAX_H3} {MINIMAX_H3_VAE}"),
    Use("diffusers.ZImageTransformer2DModel._prepare_sequence", "parallel_backend/families/z_image/transformer.py",
        "feats, pos_ids, inner_pad_mask, pad_token, noise_mask, device"),
    Use("diffusers.models.attention_dispatch._native_attention_forward_op", "lab/bench/ranks/peers.py",
        "ctx, query, key, value, attn_mask, dropout_p, is_causal, scale"),
    Use("diffusers.models.embeddings.get_2d_sincos_pos_embed", "parallel_backend/families/pixart/transformer.py",
        "embed_dim, grid_size, *, base_size, device"),
    Use("diffusers.models.embeddings.get_3d_rotary_pos_embed", "parallel_backend/families/cogvideox/transformer.py",
        "embed_dim, *, crops_coords, grid_size, temporal_size, grid_type, max_size, device"),
    Use("diffusers.pipelines.cogvideo.pipeline_cogvideox.get_resize_crop_region_for_grid",
        "parallel_backend/families/cogvideox/transformer.py", "src, tgt_width, tgt_height"),
    Use("diffusers.quantizers.gguf.utils.dequantize_functions", "parallel_backend/loading/decoding.py"),
    Use("gguf.GGUFReader._get", GGUF, "offset, dtype, count, override_order", overridden=True),
    Use("gguf.GGUFReader._get_field_parts", GGUF, "orig_offs, raw_type", overridden=True),
    Use("gguf.GGUFReader._get_str", GGUF, "offset", overridden=True),
    Use("gguf.GGUFReader._get_tensor_info_field", GGUF, "orig_offs", overridden=True),
    Use("gguf.gguf_reader.ReaderField", GGUF),
    Use("gguf.gguf_reader.ReaderTensor", GGUF),
    Use("xfuser.core.distributed.runtime_state._RUNTIME", "lab/bench/ranks/xfuser_peer.py"),
)  # fmt: skip

OF_INSTANCES = {("parallel_backend/autoencoder/spatial/layers.py", "_padding")}
"""Attributes that only constructors set; a test below looks at them."""


@pytest.mark.parametrize("use", USES, ids=str)
def test_it_is_as_we_use_it(use):
    if importlib.util.find_spec(use.name.partition(".")[0]) is None:
        pytest.skip(f"{use.name.partition('.')[0]} is not installed")
    try:
        value = private_names.value_of(use.name)
    except (ImportError, AttributeError):
        pytest.fail(f"{use.installed} has no {use.name}, which {use.by} needs")
    if not use.takes:
        return
    actual = private_names.parameters(value)
    if not private_names.fits(use.takes, actual, exactly=use.overridden):
        pytest.fail(f"{use.installed}: {use.name} takes ({', '.join(actual)}); {use.by} has ({use.takes})")


def test_every_use_is_listed():
    watched = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "scripts/core_contract/lists").rglob("*.py"))
    comfyuis = {*re.findall(r"\b_\w+", watched), "_load_list"}  # mypy watches the last one
    unlisted = [
        f"{file}: {name}"
        for path, names in private_names.found(FILES).items()
        for name in sorted(names)
        if (file := path.relative_to(ROOT).as_posix(), name) not in OF_INSTANCES
        and not (file.startswith("nodes/") and name in comfyuis)
        and not any(file in use.by.split() and _is_of(name, use.name) for use in USES)
    ]
    assert unlisted == [], "use public names instead, or list in this test what version after version has to keep"


def _is_of(name: str, listed: str) -> bool:
    return listed == name or listed.startswith(f"{name}.") or listed.endswith(f".{name}")


def test_everything_listed_is_used():
    for use in USES:
        last = use.name.rpartition(".")[2]
        assert [file for file in use.by.split() if last not in (ROOT / file).read_text(encoding="utf-8")] == [], use


def test_converters_are_found():
    assert len(CONVERTERS) >= 8


def test_attention_returns_the_log_sum_exp_second():
    for use in USES:
        if "_scaled_dot_product_" in use.name:
            returns = private_names.value_of(use.name).default._schema.returns
            assert [each.name.replace("_", "") for each in returns][:2] == ["output", "logsumexp"], use


def test_operators_of_collectives_have_their_group_where_we_look_for_it():
    for name, place in crossing_bytes._GROUP_ARGUMENT.items():
        assert list(private_names.parameters(getattr(torch.ops.c10d, name)))[place] == "process_group", name
    for name in ("all_to_all_single", "all_gather_into_tensor"):
        assert list(private_names.parameters(getattr(torch.ops._c10d_functional, name)))[-1] == "group_name", name


def test_an_operator_has_the_name_by_which_its_bytes_are_counted():
    assert torch.ops.c10d.allreduce_.default.overloadpacket.__name__ == "allreduce_"


@pytest.mark.parametrize("kind", ["wan.WanCausalConv3d", "qwenimage.QwenImageCausalConv3d"])
def test_causal_convolutions_pad_rows_by_the_third_number(kind):
    module, _, name = kind.partition(".")
    conv = private_names.value_of(f"diffusers.models.autoencoders.autoencoder_kl_{module}.{name}")
    assert list(conv(1, 1, 3, padding=(4, 5, 6))._padding) == [6, 6, 5, 5, 8, 0]


def test_the_parts_of_a_gguf_tensor(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "flux")
    writer.add_tensor("a", torch.zeros(2, 3).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "file.gguf").tensors
    assert tensor.field.parts[3].tolist() == [3, 2]
    assert tensor.field.parts[4].tolist() == [gguf.GGMLQuantizationType.F32]


def test_weights_that_stay_in_float32_are_names_or_none():
    import diffusers

    assert diffusers.ModelMixin._keep_in_fp32_modules is None
    assert all(isinstance(name, str) for name in diffusers.WanTransformer3DModel._keep_in_fp32_modules)


def test_the_cuda_library_registers_memory():
    library = getattr(torch._C, "_cudart", None)
    if library is None:
        pytest.skip("this torch is not built for CUDA")
    assert callable(library.cudaHostRegister)
    assert callable(library.cudaHostUnregister)


PLANTED = """
import os
import diffusers.utils.private_thing
from torch import nn
from torch._inductor import config
from gguf import GGUFReader
from collections import OrderedDict
class Mine(nn.Module):
    def _apply(self, fn, recurse=True): ...
    def _fine(self): self._also_fine = self._parameters
class Reader(GGUFReader):
    def _get_str(self, offset): ...
def use(module, own):
    own._also_fine
    os._exit(OrderedDict()._asdict())
    return module._buffers, getattr(module, "_hooks"), nn._reduction
"""


def test_a_planted_use_is_found(tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(PLANTED)
    assert private_names.found([file])[file] == {
        "diffusers.utils.private_thing", "torch._inductor.config", "_apply", "_parameters", "_get_str", "_buffers",
        "_hooks", "_reduction",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("takes", "exactly", "right"),
    [
        ("a, b", False, True), ("a, *, c", False, False), ("a, *, b, c", False, True), ("b, a", False, False),
        ("a", False, False), ("a, b, d", False, False), ("a, b", True, False), ("a, b, c", True, True),
    ],
)  # fmt: skip
def test_a_changed_signature_is_found(takes, exactly, right):
    assert private_names.fits(takes, {"a": True, "b": True, "c": False}, exactly=exactly) is right
