"""CLIP and VAE: core's classes, tokenizers and text encoders."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes, ReadsOnly

TEXT, CLIP, VAE = "nodes/remote/text_encoder.py", "nodes/remote/clip.py", "nodes/remote/vae.py"
CLIP_TYPES = " ".join(
    f"nodes/families/{family}.py"
    for family in (
        "dit",
        "flux",
        "flux2",
        "hunyuan_video",
        "ltx",
        "mochi",
        "open_sora1",
        "open_sora2",
        "pixart",
        "qwen_image",
        "sd3",
        "z_image",
    )
)

ENTRIES = (
    *core_module(
        "comfy.sd",
        ReadsOnly(
            "CLIP",
            "self.cond_stage_model",
            "dtypes to reset_clip_options set_clip_options encode_token_weights load_state_dict load_sd state_dict "
            "disable_offload can_assign_sd modules memory_estimation_function generate",
            by=TEXT,
            why="the remote text encoder stands in for it",
        ),
        ReadsOnly(
            "CLIP",
            "self.tokenizer",
            "tokenize_with_weights state_dict decode",
            by=TEXT,
            why="the checkpoint's tokenizer stands in for it",
        ),
        Passes(
            "CLIP.tokenize",
            "self.tokenizer.tokenize_with_weights(text, return_word_ids, **kwargs)",
            by=TEXT,
            why="how that tokenizer is called",
        ),
        Passes(
            "CLIP.encode_from_tokens",
            "self.cond_stage_model.encode_token_weights(tokens)",
            by=TEXT,
            why="encodes a prompt",
        ),
        Passes("CLIP.load_sd", "self.cond_stage_model.load_sd(sd)", by=TEXT, why="refused"),
        Mentions("CLIP.encode_from_tokens", "layer", by=TEXT, why="CLIPSetLastLayer"),
        Has(
            "CLIPType",
            "STABLE_DIFFUSION SD3 FLUX MOCHI LTXV HUNYUAN_VIDEO PIXART LUMINA2 QWEN_IMAGE",
            by=CLIP_TYPES,
            why="the family's text encoders",
        ),
        Mentions("VAE.__init__", "pixel_space_vae", by=VAE, why="the smallest VAE"),
        Has(
            "VAE",
            "first_stage_model patcher size memory_used_encode memory_used_decode latent_channels latent_dim "
            "output_channels upscale_ratio downscale_ratio upscale_index_formula downscale_index_formula",
            by=VAE,
            why="what nodes read from a VAE",
        ),
        Overrides("VAE.decode(samples_in, vae_options)", by=VAE, why="runs on the ranks"),
        Overrides("VAE.encode(pixel_samples)", by=VAE, why="runs on the ranks"),
        Overrides("VAE.decode_tiled(samples, tile_x, *args, **kwargs)", by=VAE, why="whole, if it fits"),
        Overrides("VAE.encode_tiled(pixel_samples, tile_x, *args, **kwargs)", by=VAE, why="whole, if it fits"),
        Calls("VAE.spacial_compression_encode()", by="nodes/vae.py", why="whether tiles were used"),
    ),
    *core_module(
        "comfy.nested_tensor",
        Has("NestedTensor", "is_nested", by="nodes/vae.py", why="a video with sound"),
        Calls("NestedTensor.unbind()", by="nodes/vae.py", why="the video of it, which VAEDecode takes"),
    ),
    *core_module(
        "comfy_extras.nodes_lt_upsampler",
        ReadsOnly(
            "",
            "vae.first_stage_model",
            "per_channel_statistics",
            by=VAE,
            why="an LTX VAE's; refused of others",
            word="per_channel_statistics",
        ),
        ReadsOnly(
            "",
            "vae.first_stage_model.per_channel_statistics",
            "un_normalize normalize",
            by="nodes/remote/latent_statistics.py",
            why="what it asks an LTX VAE's statistics for",
            word="un_normalize",
        ),
    ),
    *core_module(
        "comfy.sd1_clip",
        Calls("SDTokenizer.tokenize_with_weights(text, return_word_ids, **kwargs)", by=TEXT, why="a prompt's tokens"),
        Passes(
            "SDTokenizer.__init__",
            "tokenizer_class.from_pretrained(tokenizer_path, **kwargs)",
            by=TEXT,
            why="makes our tokenizer",
        ),
        ReadsOnly(
            "SDTokenizer.__init__", "self.tokenizer", "get_vocab", by=TEXT, why="our tokenizer", word="get_vocab"
        ),
        ReadsOnly(
            "SDTokenizer.tokenize_with_weights", "self.tokenizer", "", by=TEXT, why="our tokenizer", word="__call__"
        ),
        Mentions("SDTokenizer.__init__", "input_ids", by=TEXT, why="what our tokenizer gives"),
        Overrides("ClipTokenWeightEncoder.encode_token_weights(token_weight_pairs)", by=TEXT, why="prompt weights"),
        Passes(
            "ClipTokenWeightEncoder.encode_token_weights",
            "self.encode(to_encode)",
            by=TEXT,
            why="encodes padded prompts",
        ),
        ReadsOnly(
            "ClipTokenWeightEncoder.encode_token_weights",
            "self",
            "gen_empty_tokens special_tokens encode",
            by=TEXT,
            why="the remote text encoder",
            word="special_tokens encode",
        ),
        Mentions("gen_empty_tokens", "end pad", by=TEXT, why="keys of special_tokens"),
    ),
    *core_module(
        "comfy.text_encoders.spiece_tokenizer",
        Calls("SPieceTokenizer.from_pretrained(path)", by=TEXT, why="tokenizers in SentencePiece's format"),
    ),
    *core_module(
        "comfy.text_encoders.flux",
        Mentions("", "tekken_model", by=CLIP, why="where Mistral's vocabulary is"),
    ),
)
