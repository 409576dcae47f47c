"""Nodes that need a model's layers are refused with what they do, and before weights load if the prompt shows them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.ldm.modules.attention
import comfy.model_management
import pytest
import torch
from any_folder_name.nodes.bridges.announcements import FLAGS, flags_without_effect
from any_folder_name.nodes.remote.added_to_steps import added_to_steps
from any_folder_name.parallel_backend.errors import InvalidRequest
from comfy.patcher_extension import PatcherInjection
from comfy_extras import nodes_model_advanced
from comfy_extras.nodes_pag import PerturbedAttentionGuidance
from comfy_extras.nodes_torch_compile import TorchCompileModel
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, loader_node, parallel_sampler

Patch = Callable[[Any], Any]


def option(name: str, value: Any) -> Patch:
    """Return a patch that sets an option in ``transformer_options``, like such a node."""

    def patch(model: Any) -> Any:
        model.model_options["transformer_options"][name] = value
        return model

    return patch


PATCHES: dict[str, tuple[Patch, str]] = {
    "HyperTile": (option("patches", {"attn1_patch": [print]}), "a node changes what .* HyperTile"),
    "TorchCompileModel": (
        lambda model: TorchCompileModel.execute(model, "inductor").args[0],
        "a node compiles the model, .* have the input compile",
    ),
    "ScaleROPE": (option("rope_options", {"scale_x": 2.0}), "a node scales or shifts the positions .* ScaleROPE"),
    "attention": (
        option("optimized_attention_override", print),
        "a node chooses an attention kernel, .* Parallel Loader and Parallel Model have",
    ),
}


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize(("patch", "message"), PATCHES.values(), ids=PATCHES)
def test_nodes_are_refused_before_sampling(
    loaded: Loaded, sample: Callable[..., Any], patch: Patch, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}.*: remove that node"):
        sample(patch(loaded.model.clone()), empty_latent())
    assert not loaded.client.work


@pytest.mark.newest
@pytest.mark.parametrize("kernel", ["pytorch attention", "comfy kitchen attention"])
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_the_choice_of_a_kernel_is_left_to_the_ranks(
    loaded: Loaded, sample: Callable[..., Any], kernel: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """comfy-kitchen's attention, which needs a GPU, is ComfyUI's function for it whether or not it can run here."""
    attention = comfy.ldm.modules.attention
    kitchens = attention.attention_comfy_kitchen_int8
    monkeypatch.setitem(attention.REGISTERED_ATTENTION_FUNCTIONS, "comfy_kitchen_int8", kitchens)
    model = nodes_model_advanced.ModelAttentionBackend().patch(loaded.model, kernel)[0]
    results = [sample(each, empty_latent()) for each in (model, loaded.model, model)]
    assert torch.equal(results[0], results[1])
    assert added_to_steps(model) == ""
    (text,) = [record.message for record in caplog.records if "ModelAttentionBackend" in record.message]
    assert f"chooses {kernel}, and the input attention of Parallel Loader or Parallel Model chooses the kernel" in text


def sparse_function() -> Callable[..., Any]:
    """Return a function as ComfyUI's file for sparse attention makes them, under the name of that file."""

    def attend(*_: Any, **__: Any) -> Any:
        raise AssertionError("attention runs in the ranks")

    attend.__module__ = "/home/someone/ComfyUI/comfy_extras/nodes_sparse_attention"
    return attend


@pytest.mark.newest
@pytest.mark.parametrize("where", ["before", "after", "blocks"])
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_sparse_attention_is_refused_by_its_nodes_name(loaded: Loaded, sample: Callable[..., Any], where: str) -> None:
    """Newer versions have the node: it replaces blocks of MiniMax-H3, and attends for all others in every step."""
    model = loaded.model.clone()
    if where == "blocks":
        model.set_model_optimized_attention(comfy.ldm.modules.attention.attention_pytorch)
        model.set_model_patch_replace(sparse_function(), "dit", "double_block", 0)
    elif where == "before":
        model.model_options["transformer_options"]["optimized_attention_override"] = sparse_function()
    else:
        function = sparse_function()

        def install(_: Any, timestep: Any, options: dict[str, Any]) -> None:
            options["transformer_options"]["optimized_attention_override"] = function

        model.add_callback_with_key("on_prepare_state", "block_sparse_attention", install)
    with pytest.raises(InvalidRequest, match=r"^BlockSparseAttention lets each token attend to some .*: remove that"):
        sample(model, empty_latent())


@pytest.mark.newest
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_another_attention_is_refused(loaded: Loaded, sample: Callable[..., Any]) -> None:
    model = loaded.model.clone()
    model.set_model_optimized_attention(comfy.ldm.modules.attention.attention_split)
    with pytest.raises(InvalidRequest, match=r"^a node chooses an attention kernel"):
        sample(model, empty_latent())


def walk(model: Any, seen: Callable[[torch.nn.Module], None]) -> Any:
    """Visit the linear layers that ``modules()`` lists, as nodes for quantised kernels do."""
    layers = [layer for layer in model.model.diffusion_model.modules() if isinstance(layer, torch.nn.Linear)]
    assert len(layers) > 10
    for layer in layers:
        seen(layer)
    return model


def wrap_forward(layer: Any) -> None:
    layer.forward = lambda *args, inner=layer.forward: inner(*args) * 0.5


def weight_wrapper(model: Any) -> Any:
    model.add_weight_wrapper("diffusion_model.blocks.0.self_attn.q.weight", lambda weight: weight * 0.5)
    return model


def injection(model: Any) -> Any:
    model.set_injections("a node's", [PatcherInjection(inject=print, eject=print)])
    return model


def replace_block(model: Any) -> Any:
    model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 0)
    return model


def object_patch(model: Any) -> Any:
    model.add_object_patch("diffusion_model.forward_orig", print)
    return model


CHANGES: dict[str, tuple[Patch, str]] = {
    "forward": (lambda model: walk(model, wrap_forward), "wraps or replaces the layer text_embedding"),
    "hook": (
        lambda model: walk(model, lambda layer: layer.register_forward_hook(print)),
        "wraps or replaces the layer",
    ),
    "add_weight_wrapper": (weight_wrapper, r"computes the weight diffusion_model\.blocks\.0\.self_attn\.q\..* anew"),
    "injection": (injection, r"changes the layers while they run \(injection a node's\)"),
    "block": (replace_block, "replaces double_block 0 of the model, and not to leave it out"),
    "object patch": (object_patch, r"replaces diffusion_model\.forward_orig"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_changes_of_layers_are_refused(load: Callable[..., Loaded], native: Any, change: Patch, message: str) -> None:
    loaded = load()
    with pytest.raises(InvalidRequest, match=f"^a node ({message}).*: remove that node"):
        ksampler(change(loaded.model.clone()), empty_latent(), steps=1)
    assert not loaded.client.work


def test_the_refusal_of_a_replaced_block_has_its_error_and_interrupts_pass(
    load: Callable[..., Loaded],
) -> None:
    def interrupt(*_: Any) -> None:
        raise comfy.model_management.InterruptProcessingException

    model = load().model.clone()
    with pytest.raises(InvalidRequest, match="replaces double_block 0") as refusal:
        ksampler(replace_block(model.clone()), empty_latent(), steps=1)
    causes = [error := refusal.value]
    while error := error.__cause__:
        causes.append(error)
    assert any("the block runs on the ranks" in str(error) for error in causes)
    model.set_model_patch_replace(interrupt, "dit", "double_block", 0)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        ksampler(model, empty_latent(), steps=1)


def test_what_only_reads_layers_works(loaded: Loaded) -> None:
    model = walk(loaded.model, lambda layer: layer.weight.shape)
    assert list(model.model.parameters()) == []
    ksampler(model, empty_latent(), steps=1)


def test_a_layer_out_of_reach_is_an_attribute_error_that_says_what_to_do(native: Any, loaded: Loaded) -> None:
    ours, theirs = loaded.model.model.diffusion_model, native.model.diffusion_model
    assert getattr(ours, "forward_orig", 5) == 5
    with pytest.raises(AttributeError, match=r"^a node uses diffusion_model\.forward_orig; .* remove that node"):
        _ = ours.forward_orig
    with pytest.raises(InvalidRequest, match=r"forward_orig"):
        loaded.model.get_model_object("diffusion_model.forward_orig")
    numbers = {name: value for name, value in vars(theirs).items() if isinstance(value, int | float | str)}
    assert numbers.keys() >= {"dim", "num_layers", "freq_dim"}
    assert {name: getattr(ours, name) for name in numbers} == numbers | {"training": ours.training}


def test_a_layer_shows_its_weights_and_refuses_the_rest(native: Any, loaded: Loaded) -> None:
    ours, theirs = loaded.model.model.diffusion_model.blocks, native.model.diffusion_model.blocks
    assert len(ours) == len(theirs)
    assert [block.ffn[2].weight.shape for block in ours] == [block.ffn[2].weight.shape for block in theirs]
    assert ours[-1].self_attn.q.bias.shape == theirs[-1].self_attn.q.bias.shape
    with pytest.raises(IndexError):
        _ = ours[len(theirs)]
    refused = {
        r"uses diffusion_model\.blocks\.0\.register_forward_hook": lambda: ours[0].register_forward_hook(print),
        r"sets diffusion_model\.blocks\.0\.forward": lambda: setattr(ours[0], "forward", print),
        r"calls the layer diffusion_model\.blocks\.0": lambda: ours[0](1),
    }
    for message, change in refused.items():
        with pytest.raises(InvalidRequest, match=f"^a node {message}; .* remove that node"):
            change()


def test_a_method_that_a_node_sets_is_refused(load: Callable[..., Loaded]) -> None:
    loaded = load()
    loaded.model.model.diffusion_model.forward_orig = print
    with pytest.raises(InvalidRequest, match="wraps or replaces the layer forward_orig"):
        ksampler(loaded.model, empty_latent(), steps=1)


def test_callbacks_are_said_once(loaded: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    model, called = loaded.model.clone(), []
    model.add_callback_with_key("on_pre_run", "a node's", called.append)
    for _ in range(2):
        ksampler(model, empty_latent(), steps=1)
    assert len(called) == 2
    (text,) = [record.message for record in caplog.records if "a node's" in record.message]
    assert "(on_pre_run) of another node runs in ComfyUI's process" in text


def parsed(*flags: str) -> Any:
    return comfy.cli_args.parser.parse_args([*flags])


def test_comfyuis_flags_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    args = parsed("--fast", "fp16_accumulation", "--use-sage-attention", "--deterministic", "--cpu-vae")
    model = (
        "not obeyed by the ranks: --use-sage-attention (choose attention sage in Parallel Loader or Parallel Model); "
        "--fast fp16_accumulation, --deterministic (they have no such option)"
    )
    vae = f"not obeyed by the ranks: --cpu-vae ({FLAGS['vae']['cpu_vae']})"
    assert [flags_without_effect("model", args=args) for _ in range(2)] == [model, model]
    assert [flags_without_effect("vae", args=args) for _ in range(2)] == [vae, vae]
    assert [record.message for record in caplog.records] == [f"Parallel DiT: {text}" for text in (model, vae)]
    obeyed = parsed("--cpu", "--bf16-unet", "--port", "8189", "--bf16-vae")
    assert flags_without_effect(*FLAGS, args=obeyed) == ""


FLAGS_OF_PARTS = [(part, flag) for part in ("vae", "text encoder") for flag in FLAGS[part]]


@pytest.mark.parametrize(("part", "flag"), FLAGS_OF_PARTS, ids=[flag for _, flag in FLAGS_OF_PARTS])
def test_a_flag_is_said_as_it_is_given(part: Any, flag: str) -> None:
    (given,) = [
        option for option in comfy.cli_args.parser._option_string_actions if option[2:].replace("-", "_") == flag
    ]
    sentence = flags_without_effect(*FLAGS, args=parsed(given))
    assert sentence == f"not obeyed by the ranks: {given} ({FLAGS[part][flag]})"
    assert flags_without_effect("model", args=parsed(given)) == ""


def test_the_loader_says_what_concerns_its_outputs(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in ("cpu_vae", "fp16_text_enc", "fast"):
        monkeypatch.setattr(comfy.cli_args.args, flag, True)
    (text,) = loader_node().execute("tiny", "fp32", "0,1").ui["text"]
    assert "--fast (they have no such option); --cpu-vae (they run a VAE on their devices" in text


def test_every_flag_exists() -> None:
    names = vars(comfy.cli_args.args).keys()
    assert {flag for flags in FLAGS.values() for flag in flags} - names <= {"enable_triton_backend", "use_ck_attention"}


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_replacing_attention_during_sampling_is_refused(loaded: Loaded, sample: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^a node replaces attention .* PerturbedAttention.*: remove that node"):
        sample(PerturbedAttentionGuidance.execute(loaded.model, 3.0).args[0], empty_latent())


@pytest.mark.parametrize("between", ["ModelSamplingSD3", "LoraLoaderModelOnly"])
def test_the_prompt_shows_replaced_attention(models: Path, between: str) -> None:
    node = loader_node()
    node.hidden.prompt = {
        "7": {"class_type": "ParallelLoader", "inputs": {}},
        "8": {"class_type": between, "inputs": {"model": ["7", 0]}},
        "9": {"class_type": "PerturbedAttentionGuidance", "inputs": {"model": ["8", 0]}},
        "10": {"class_type": "SaveImage", "inputs": {"images": ["9", 0]}},
    }
    with pytest.raises(InvalidRequest, match=r"^PerturbedAttentionGuidance replaces attention .* remove that node"):
        node.execute("tiny", "fp32", "0,1")
    node.hidden.prompt["8"]["inputs"]["model"] = ["11", 0]
    node.hidden.prompt["11"] = {"class_type": "UNETLoader", "inputs": {}}
    assert node.execute("tiny", "fp32", "0,1").args
