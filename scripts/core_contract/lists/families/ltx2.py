"""What LTX-2's bridge relies on."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, ReadsOnly
from scripts.core_contract.lists.transformers import skippable, transformer
from scripts.core_contract.model_kinds import Detects, Equals

LTX2, CONNECTORS = "nodes/families/ltx2.py", "nodes/families/ltx2_connectors.py"
CONNECTED, MARKED = (0, 27, 0), (0, 33, 0)
"""The first tested releases whose transformer runs the text connectors, and whose LTX-2.5 marks single frames."""

ENTRIES = (
    *core_module(
        "comfy.model_base",
        ReadsOnly(
            "LTXAV",
            "self.diffusion_model",
            "patchifier a_patchifier preprocess_text_embeds causal_temporal_positioning vae_scale_factors",
            by=LTX2,
            why="the stand-in has these",
            word="preprocess_text_embeds",
        ),
        Mentions(
            "LTXAV.extra_conds",
            "attention_mask frame_rate denoise_mask audio_denoise_mask keyframe_idxs latent_shapes",
            by=LTX2,
            why="arguments of a call",
        ),
        Mentions(
            "LTXAV.extra_conds",
            "guide_attention_entries ref_audio",
            by=LTX2,
            why="guides of a video and a voice to imitate",
            since=CONNECTED,
        ),
        Mentions("LTXAV.extra_conds", "generated_keyframes", by=LTX2, why="marks of single frames", since=MARKED),
    ),
    *core_module(
        "comfy.supported_models",
        Detects("LTXAV", {"image_model": "ltxav"}, "LTXAV", "LTXAV", "shift", by=LTX2, why="LTX-2"),
    ),
    *core_module(
        "comfy.latent_formats",
        Equals("LTXAV.latent_channels", 128, by=LTX2, why="the channels of its picture", word="ltxav"),
    ),
    *core_module(
        "comfy.ldm.lightricks.av_model",
        *transformer(
            "LTXAVModel(x, timestep, *, context, attention_mask, frame_rate, transformer_options, keyframe_idxs, "
            "denoise_mask)",
            LTX2,
            "context a_timestep",
        ),
        skippable("LTXAVModel._process_transformer_blocks", LTX2),
        Calls(
            "LTXAVModel.preprocess_text_embeds(context, *, unprocessed)",
            by=CONNECTORS,
            why="a prompt goes through the text connectors",
            since=CONNECTED,
        ),
        Mentions(
            "LTXAVModel._process_transformer_blocks",
            "stg_self_attn_blocks",
            by=LTX2,
            why="layers that pass on their values",
            since=MARKED,
        ),
        Mentions(
            "BasicAVTransformerBlock.forward",
            "run_vx run_ax a2v_cross_attn v2a_cross_attn",
            by=LTX2,
            why="options, of which two are refused",
        ),
        Has("", "CompressedTimestep", by=LTX2, why="whose timesteps gate attention across streams", since=CONNECTED),
        Has("", "BasicAVTransformerBlock", by=LTX2, why="the order of attention across its streams"),
    ),
    *core_module(
        "comfy.ldm.lightricks.model",
        Calls(
            "LTXVModel.keyframes_abs_pos_mask(pixel_coords, orig_shape, grid_mask, num_guide_tokens, "
            "generated_keyframes)",
            by=LTX2,
            why="which tokens are of single frames",
            since=MARKED,
        ),
        Calls(
            "LTXVModel._downsample_mask_to_latent(mask, f_lat, h_lat, w_lat)",
            by="nodes/families/ltx2_guides.py",
            why="the strength of each token of a guide with a mask",
            since=CONNECTED,
        ),
        Calls("LTXVModel.tokens_per_latent_frame(orig_shape)", by=LTX2, why="asked for by the above", since=MARKED),
    ),
    *core_module(
        "comfy.ldm.lightricks.symmetric_patchifier",
        Calls(
            "AudioPatchifier._get_audio_latent_time_in_sec(start_latent, end_latent, dtype, device)",
            by=LTX2,
            why="when the tokens of a voice begin and end",
        ),
        Calls("AudioPatchifier(patch_size, *, start_end)", by=LTX2, why="tokens of the sound"),
    ),
)
