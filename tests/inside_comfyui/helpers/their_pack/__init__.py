"""What widespread packs of nodes do to a MODEL, each in a few lines. Tests copy the file to where packs are."""

from unittest.mock import patch

import comfy.model_management
import torch
from comfy.ldm.wan.model import WanModel
from comfy_api.torch_helpers import set_torch_compile_wrapper

from nodes import KSampler


class Node:
    """Takes and gives a MODEL."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    INPUT_TYPES = staticmethod(lambda: {"required": {"model": ("MODEL",)}})

    def run(self, model):
        """Change a clone."""
        model = model.clone()
        self.change(model, model.get_model_object("diffusion_model"))
        return (model,)


class TeaCacheLike(Node):
    """Replaces a method of the transformer in each call."""

    def change(self, model, transformer):
        def wrapper(apply, given):
            with patch.multiple(transformer, forward_orig=lambda *args, **options: args[0]):
                return apply(given["input"], given["timestep"], **given["c"])

        model.set_model_unet_function_wrapper(wrapper)


class FirstBlockCacheLike(Node):
    """Replaces the list of blocks in each call."""

    def change(self, model, transformer):
        name = next((name for name in ("double_blocks", "joint_blocks", "blocks") if hasattr(transformer, name)), None)
        if name is None:
            raise ValueError(f"No double blocks found for {transformer.__class__.__name__}")

        def wrapper(apply, given):
            with patch.object(transformer, name, torch.nn.ModuleList()):
                return apply(given["input"], given["timestep"], **given["c"])

        model.set_model_unet_function_wrapper(wrapper)


class RegionalLike(Node):
    """Makes another class of the transformer, and leaves those of other classes alone."""

    def change(self, model, transformer):
        if transformer.__class__ in (WanModel,):
            model.add_object_patch("diffusion_model.__class__", type("Regional", (WanModel,), {}))


class LegacyRegionalLike(Node):
    """Does so at once."""

    def change(self, model, transformer):
        transformer.__class__ = type("Regional", (WanModel,), {})


class CompileLike(Node):
    """Compiles the transformer."""

    def change(self, model, transformer):
        model.add_object_patch("diffusion_model", torch.compile(transformer, backend="eager"))


class CompileBlocksLike(Node):
    """Compiles blocks, and has words of its own for what goes wrong."""

    def change(self, model, transformer):
        keys = [f"diffusion_model.blocks.{place}" for place in range(len(transformer.blocks))]
        try:
            set_torch_compile_wrapper(model=model, keys=keys, backend="eager")
        except Exception as error:
            raise RuntimeError("Failed to compile model") from error


class PerturbWeightsLike(Node):
    """Reads the values of weights."""

    def change(self, model, transformer):
        weights = transformer.state_dict()
        for name in weights:
            weights[name] = weights[name] + torch.normal(torch.zeros_like(weights[name]), 0.01).to("cpu")


class LegacyCompileLike(Node):
    """Does so at once, for all clones."""

    def change(self, model, transformer):
        model.model.diffusion_model = torch.compile(transformer, backend="eager")


class ReplaceLike(Node):
    """Puts a transformer of its own into the model."""

    def change(self, model, transformer):
        model.model.diffusion_model = Embedder()


class SageAttentionLike(Node):
    """Chooses an attention kernel."""

    def change(self, model, transformer):
        def attention(function, *args, **options):
            return function(*args, **options)

        model.model_options["transformer_options"]["optimized_attention_override"] = attention


class BlockSwapLike(Node):
    """Moves blocks out of the way."""

    def change(self, model, transformer):
        for block in transformer.blocks:
            block.to("cpu")


class RopeLike(Node):
    """Puts an object of its own in the place of a layer."""

    def change(self, model, transformer):
        model.add_object_patch("diffusion_model.rope_embedder", Embedder())


class Embedder(torch.nn.Module):
    """See ``RopeLike``."""


class SkipLayerLike(Node):
    """Skips a block of the negative prompt's half of a batch."""

    def change(self, model, transformer):
        def skip(args, extra):
            out = extra["original_block"](args)
            return {"img": torch.cat([out["img"][:1], args["img"][1:]])}

        model.set_model_patch_replace(skip, "dit", "double_block", 0)


class AskingLike(Node):
    """Asks for something that no transformer has, and fails for a reason of its own."""

    def change(self, model, transformer):
        def wrapper(apply, given):
            assert not hasattr(transformer, "state_of_their_own")
            raise ValueError("a fault of their own")

        model.set_model_unet_function_wrapper(wrapper)


class InterruptedLike(Node):
    """Asks for a method, goes on without it, and is interrupted."""

    def change(self, model, transformer):
        def wrapper(apply, given):
            assert not hasattr(transformer, "forward_orig")
            raise comfy.model_management.InterruptProcessingException

        model.set_model_unet_function_wrapper(wrapper)


class SamplerLike(KSampler):
    """Samples, as core does, with what others have done to the MODEL."""

    def sample(self, *args, **options):
        """See the class."""
        return super().sample(*args, **options)


NODE_CLASS_MAPPINGS = {"SamplerLike": SamplerLike} | {each.__name__: each for each in Node.__subclasses__()}
