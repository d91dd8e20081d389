"""Tiny random models of all families in the automatic classes of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

WORDS, LAYERS = 160, 4
# Special tokens have smaller ids.
FIRST_WORD: Final = 100

TASKS: Final = {
    "causal language model": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image and text to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
"""The tables of transformers by task."""

# Most that a number of a configuration may be, by a pattern of its name; None leaves it. The first match decides.
_SIZES: Final[list[tuple[str, int | None]]] = [
    (r"vocab_size|n_words", WORDS),
    (r"mask_.*|.*kernel.*|.*stride.*|.*_theta|.*scale.*|.*hash.*", None),
    (r"num_experts_per_tok|moe_topk|.*top_k|num_selected_experts|moe_k|num_experts_per_token", 2),
    (r"n_group|topk_group|n_groups|mamba_n_groups|n_shared_experts|num_shared_experts", 1),
    (r"(n|num)_(routed|local)?_?experts|num_local_experts|moe_num_experts|ffn_num_experts", 4),
    (r"(num_nextn_predict|nextn|mtp).*", 0),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r".*(q|kv|o|lora|dt|time_step)_?(lora)?_rank", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 16),
    (r"rotary_dim|rotary_emb_dim", 4),
    (
        r"head_dim|.*_head_dim|d_kv|attention_head_size|kv_channels|d_head|attention_key_dim|index_head_dim",
        8,
    ),
    (r".*heads?|n_head.*|.*_heads_.*|attention_groups|num_query_groups", 2),
    (
        r"(num|n)_(hidden_|encoder_|decoder_|self_attends_per_)?(layers?|blocks?)|.*_layers|n_layer|depth",
        LAYERS,
    ),
    (
        r".*(intermediate|ffn|ff|feed_forward|inner).*(size|dim|hidden)?|n_inner|d_ff|mlp_dim|hidden_dim",
        32,
    ),
    (
        r"max_(position|source_position|target_position|seq|text).*|n_positions|n_ctx|context_length|seq_length",
        64,
    ),
    (r"image_size|input_size", 32),
    (r"patch_size|encoder_stride", 8),
    (
        r".*(hidden|embed|embedding|embd|model|proj|projection|state|latent|lru).*(size|dim|width)|d_model|n_embd",
        16,
    ),
    (
        r"dim|width|emb_dim|d_embed|embed_dim|hidden|d_inner|hidden_size.*|out_hidden_size|output_dim|d_latents",
        16,
    ),
]

# Sizes that some configurations leave open, although their models need them.
_UNSET: Final[dict[str, int]] = {"head_dim": 8, "num_key_value_heads": 2}

_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 1.0,
}
_GEMMA3N: Final = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [32] * LAYERS,
    "activation_sparsity_pattern": [0.0] * LAYERS,
    "vocab_size_per_layer_input": WORDS,
    "laurel_rank": 8,
}
_QWEN4: Final = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 100,
}

_PICTURE_WORDS: Final = {
    "<image>": 1,
    **{f"IMGIMG{chr(65 + index)}Z": 10 + index for index in range(8)},
}
_VQ: Final = {
    "embed_dim": 16,
    "num_embeddings": 8,
    "codebook_size": 8,
    "latent_channels": 16,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "resolution": 32,
}
_SAM: Final = {
    "vision_config.sam_config": {
        "initializer_range": 0.1,
        "hidden_size": 16,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 4,
        "window_size": 2,
        "global_attn_indexes": [1],
        "mlp_dim": 32,
        "downsample_channels": [16, 16],
    },
    "vision_config.encoder_config.image_size": 64,
    "vision_config.encoder_config.patch_size": 16,
}
_GEMMA4_VISION: Final = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}

_MINICPM: Final = {
    "image_token_id": 1,
    "video_token_id": 2,
    "insert_layer_id": 0,
    "vision_config.insert_layer_id": 0,
}
_DOTS3: Final = {
    "text_config.swa_q_lora_rank": 8,
    "text_config.swa_kv_lora_rank": 8,
    "text_config.swa_head_dim": 16,
    "text_config.swa_qk_nope_head_dim": 8,
    "text_config.swa_qk_rope_head_dim": 8,
    "text_config.swa_v_head_dim": 8,
    "text_config.head_dim": 16,
    "vision_config.adapter_in_dim": 16,
    "vision_config.adapter_out_dim": 16,
}
_SECTIONS: Final = {"text_config.rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}

# Some families also need these arguments.
_NEEDED: Final[dict[str, dict[str, Any]]] = {
    "mamba2": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "swin": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": 2,
        "patch_size": 4,
    },
    "swinv2": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": 2,
        "patch_size": 4,
    },
    "donut-swin": {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 2],
        "window_size": 2,
        "patch_size": 4,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
    "bit": {"num_groups": 2},
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1},
    "longcat_flash": {"qk_head_dim": 16, "head_dim": 8},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE),
    },
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "zamba": {
        "attention_hidden_size": 32,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "apertus1p5": {
        "audio_config.codebook_dim": 16,
        "audio_config.decoder_attention_num_groups": 2,
        "vision_config": _VQ | {"spatial_scale_factor": 2},
        "image_token_offset": 20,
        "audio_token_offset": 28,
    },
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MINICPM),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _DOTS3),
    "speecht5": {"num_feat_extract_layers": 7},
    "speech-encoder-decoder": {
        "encoder.num_feat_extract_layers": 7,
        "decoder.is_decoder": True,
        "decoder.add_cross_attention": True,
    },
    "dbrx": {
        "attn_config.rope_theta": 10000.0,
        "attn_config.clip_qkv": 8.0,
        "ffn_config.hidden_size": 16,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mistral4": {"qk_rope_head_dim": 8, "head_dim": 8, "qk_head_dim": 16, "rope_parameters": _YARN},
    "gemma3n_text": _GEMMA3N,
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 110, "no_token_index": 111},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
    },
    "esm": {"vocab_size": WORDS},
    "esmc": {"vocab_size": WORDS},
    "layoutlmv3": {"coordinate_size": 2, "shape_size": 4},
    "lilt": {"channel_shrink_ratio": 1, "hidden_size": 24},
    "luke": {"entity_vocab_size": WORDS, "entity_emb_size": 16},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.5, "hidden_dim": 128},
    "levit": {"image_size": 64, "patch_size": 16},
    "mobilevitv2": {"image_size": 64},
    "siglip2": {"vision_config.num_patches": 16},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {f"text_config.{name}": value for name, value in _QWEN4.items()},
    "cohere_compass": {
        "text_config.rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
    },
    "blip-2": {"image_token_index": 1},
    "instructblip": {"image_token_index": 1},
    "instructblipvideo": {"video_token_index": 1},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "kosmos-2.5": {"latent_query_num": 16, "vision_config.patch_embed_hidden_size": 192},
    "pix2struct": {"vision_config.patch_embed_hidden_size": 192},
    "chameleon": {"image_token_id": 1, "vocabulary_map": _PICTURE_WORDS, "vq_config": _VQ},
    "emu3": {
        "vocabulary_map": {
            "<image>": 1,
            "<|extra_200|>": 2,
            **{f"<|visual token {i:06}|>": 10 + i for i in range(8)},
        },
        "vq_config": _VQ,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 32,
    },
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"] * 2,
        "text_config.num_experts_per_tok": 2,
        "text_config.n_group": 1,
        "text_config.topk_group": 1,
        **_SAM,
    },
    "unlimited_ocr": _SAM,
    "florence2": {
        "vision_config.depths": [1, 1],
        "vision_config.patch_size": [7, 3],
        "vision_config.patch_stride": [4, 2],
        "vision_config.patch_padding": [3, 1],
        "vision_config.patch_prenorm": [False, True],
        "vision_config.embed_dim": [16, 16],
        "vision_config.num_heads": [2, 2],
        "vision_config.num_groups": [2, 2],
        "vision_config.window_size": 2,
    },
    "janus": {
        "vq_config": _VQ | {"num_patches": 4, "projection_dim": 16, "image_token_embed_dim": 16}
    },
    "hunyuan_vl": {"text_config.rope_parameters": _ROPE | {"mrope_section": [1, 1, 1, 1]}},
    "fuyu": {"text_config.hidden_size": 16},
    "molmo2": {
        "vision_config.image_size": [32, 32],
        "vision_config.num_position_embeddings": 16,
        "adapter_config.vision_feature_layer": [-1, -2],
    },
    "muse_glimmer": {"out_hidden_size": 64},
    "muse_spark": {
        "out_hidden_size": 64,
        "audio_config.hidden_sizes": [16] * 4,
        "audio_config.depths": [1] * 4,
    },
    "nemotron_h_omni": {
        "vision_config.video_temporal_patch_size": 2,
        "image_token_id": 1,
        "video_token_id": 2,
        "audio_token_id": 3,
    },
    "step3p7": {"text_config.sliding_window": 4},
    "gemma4": {"vision_config": _GEMMA4_VISION},
    "gemma4_unified": {
        "vision_config": {
            "patch_size": 8,
            "pooling_kernel_size": 1,
            "model_patch_size": 8,
            "mm_embed_dim": 16,
            "mm_posemb_size": 64,
            "output_proj_dims": 16,
        }
    },
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]},
        "text_config.moe_intermediate_size": [32, 32],
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "got_ocr2": {"vision_config.image_size": 64},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "granite4_vision": {
        "image_grid_pinpoints": [[32, 32]],
        "vision_config.hidden_size": 64,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1, 2, 2, 3],
    },
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "vision-encoder-decoder": {"decoder.is_decoder": True, "decoder.add_cross_attention": True},
    "mllama": {
        "vision_config.intermediate_layers_indices": [0, 1],
        "vision_config.vision_output_dim": 48,
        "text_config.cross_attention_layers": [1, 3],
    },
    "llama4": {
        "interleave_moe_layer_step": 2,
        "vision_config.intermediate_size": 64,
        "vision_config.vision_output_dim": 16,
    },
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm4v", "glm46v", "paddleocr_vl"),
        _SECTIONS,
    ),
    **dict.fromkeys(("glm4v_moe", "glm_ocr", "glmga"), _SECTIONS | {"text_config.head_dim": 16}),
}


def list_families() -> Iterator[tuple[str, str]]:
    """Yield task and family of all models."""
    from transformers.models.auto import modeling_auto

    for task, table in TASKS.items():
        for family in getattr(modeling_auto, table):
            yield task, family


def _shrink(config: Any, without: str, first_id: int = 1) -> dict[str, Any]:
    """Return arguments that make a configuration small, and its probabilities 0 that ``without`` names."""
    found: dict[str, Any] = {}
    ids = iter(range(first_id, FIRST_WORD))
    known = vars(config)
    layers = known.get("num_hidden_layers", known.get("num_layers", 0))
    for name, value in known.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            # Special tokens of a part must differ from those that the full model gives a meaning.
            found[name] = _shrink(value, without, FIRST_WORD // 2) | {
                "model_type": value.model_type
            }
        elif name == "pad_token_id":
            found[name] = 0
        elif re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int):
            found[name] = next(ids)
        elif value is None and name in _UNSET:
            found[name] = _UNSET[name]
        elif (
            isinstance(value, float)
            and "drop" in name
            and ("layerdrop" not in name or "layerdrop" in without)
        ):
            if "dropout" in without:
                found[name] = 0.0
        elif name == "initializer_range":
            # Small values vanish where sizes are tiny.
            found[name] = 0.1
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
            if size is not None:
                found[name] = WORDS if size == WORDS else min(value, size) if value > 0 else value
        elif isinstance(value, list) and len(value) == layers > LAYERS:
            found[name] = value[:LAYERS]
        elif isinstance(value, dict) and "mrope_section" in value:
            found[name] = value | {"mrope_section": [1, 1, 2]}
    return found


def _merge(sizes: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with replaced values; a name with dots is an argument of a nested configuration."""
    merged = dict(sizes)
    for name, value in more.items():
        part, _, rest = name.partition(".")
        if part == "text_config" and part not in sizes:
            # A model of text alone has this part as its configuration.
            part, _, rest = rest.partition(".")
        merged[part] = _merge(merged.get(part, {}), {rest: value}) if rest else value
    return merged


def make_model(family: str, task: str, without: str = "") -> nn.Module:
    """Return a tiny model of a family.

    Args:
        family: The family.
        task: The task.
        without: Probabilities that are 0: ``dropout``, or ``dropout and layerdrop``.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, TASKS[task])[family]
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    config_cls = cls.config_class
    default = config_cls()
    sizes: dict[str, Any] = _shrink(default, without)
    sizes |= {"use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 0}
    needed = {
        name: value
        for name, value in _NEEDED.get(family, {}).items()
        # Families of text alone share arguments with those of pictures and text.
        if not name.startswith("vision_config") or hasattr(default, "vision_config")
    }
    sizes = _merge(sizes, needed)
    if "classification" in task:
        sizes["num_labels"] = 3
    if {"text_config", "vision_config"} <= sizes.keys() and "text" in task:
        # The largest list of blocks should be that of the text.
        for name, value in sizes["vision_config"].items():
            if value == LAYERS and re.fullmatch(r"depth|num_(hidden_)?layers", name):
                sizes["vision_config"][name] = LAYERS // 2
            elif name == "layer_types":
                sizes["vision_config"][name] = value[: LAYERS // 2]
    torch.manual_seed(0)
    made: nn.Module = cls(config_cls(**sizes))
    # Gates and projections that start at zero would hide what goes through them.
    draw = torch.Generator().manual_seed(0)
    for param in made.parameters():
        if not param.any():
            param.data.uniform_(0.05, 0.15, generator=draw)
    return made
