"""Tiny random models of all families in the automatic classes of transformers."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

WORDS, CONTEXT, LAYERS = 160, 8, 4
# Special tokens have smaller ids.
_FIRST_WORD: Final = 100

TASKS: Final = {
    "causal language model": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image and text to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
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
    (r"head_dim|.*_head_dim|d_kv|attention_head_size|kv_channels|d_head|attention_key_dim|index_head_dim", 8),
    (r".*heads?|n_head.*|.*_heads_.*|attention_groups|num_query_groups", 2),
    (r"(num|n)_(hidden_|encoder_|decoder_|self_attends_per_)?(layers?|blocks?)|.*_layers|n_layer|depth", LAYERS),
    (r".*(intermediate|ffn|ff|feed_forward|inner).*(size|dim|hidden)?|n_inner|d_ff|mlp_dim|hidden_dim", 32),
    (r"max_(position|source_position|target_position|seq|text).*|n_positions|n_ctx|context_length|seq_length", 64),
    (r"image_size|input_size", 32),
    (r"patch_size|encoder_stride", 8),
    (r".*(hidden|embed|embedding|embd|model|proj|projection|state|latent|lru).*(size|dim|width)|d_model|n_embd", 16),
    (r"dim|width|emb_dim|d_embed|embed_dim|hidden|d_inner|hidden_size.*|out_hidden_size|output_dim|d_latents", 16),
]

# Some families also need these arguments.
_NEEDED: Final[dict[str, dict[str, Any]]] = {
    "mamba2": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "donut-swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "llama4": {"interleave_moe_layer_step": 2},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
    "bit": {"num_groups": 2},
}


def list_families() -> Iterator[tuple[str, str]]:
    """Yield task and family of all models."""
    from transformers.models.auto import modeling_auto

    for task, table in TASKS.items():
        for family in getattr(modeling_auto, table):
            yield task, family


def _shrink(config: Any, without: str) -> dict[str, Any]:
    """Return arguments that make a configuration small, and its probabilities 0 that ``without`` names."""
    found: dict[str, Any] = {}
    ids = iter(range(1, _FIRST_WORD))
    known = vars(config)
    layers = known.get("num_hidden_layers", known.get("num_layers", 0))
    for name, value in known.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found[name] = _shrink(value, without) | {"model_type": value.model_type}
        elif re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int):
            found[name] = next(ids)
        elif isinstance(value, float) and "drop" in name and ("layerdrop" not in name or "layerdrop" in without):
            if "dropout" in without:
                found[name] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
            if size is not None:
                found[name] = min(value, size) if value > 0 else value
        elif isinstance(value, list) and len(value) == layers > LAYERS:
            found[name] = value[:LAYERS]
        elif isinstance(value, dict) and "mrope_section" in value:
            found[name] = value | {"mrope_section": [1, 1, 2]}
    return found


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
    sizes: dict[str, Any] = _shrink(config_cls(), without)
    sizes |= {"use_cache": False, "pad_token_id": 0, "decoder_start_token_id": 0, **_NEEDED.get(family, {})}
    if "classification" in task:
        sizes["num_labels"] = 3
    torch.manual_seed(0)
    try:
        made: nn.Module = cls(config_cls(**sizes))
    finally:
        with contextlib.suppress(AttributeError):
            del nn.Module.smart_apply  # type: ignore[attr-defined]  # transformers leaves it there
    return made


def make_inputs(model: Any, rows: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches, one of which a model should take."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(_FIRST_WORD, WORDS, (rows, CONTEXT), generator=draw)
    end = getattr(model.config, "eos_token_id", None)
    if isinstance(end, int):
        ids[:, -1] = end
    takes = inspect.signature(model.forward).parameters
    known = vars(model.config)
    nested = [vars(value) for value in known.values() if hasattr(value, "model_type")]
    size = next((config["image_size"] for config in [known, *nested] if config.get("image_size")), 32)
    height, width = (size, size) if isinstance(size, int) else size
    picture = torch.randn(rows, known.get("num_channels", 3), height, width, generator=draw)
    text = {"input_ids": ids} if "input_ids" in takes else {}
    if "pixel_values" in takes and not text:
        yield {"pixel_values": picture}
        return
    yield text
    if "decoder_input_ids" in takes:
        yield text | {"decoder_input_ids": ids.flip(1)}
    if "pixel_values" in takes:
        yield text | {"pixel_values": picture}
        yield {"pixel_values": picture}
