"""Batches for tiny models of transformers: text, and pictures with their tokens in the text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ovpatch_plugins.pipeline.cutting.block_stack import find_tensors
from tests.plugins.pipeline.tiny_models import FIRST_WORD, WORDS

CONTEXT: Final = 8
PICTURES: Final = {"pixel_values", "flattened_patches"}
"""Arguments of models for pictures."""
_SIDE: Final = 4
"""Patches in a row of a picture that is given as patches."""

Batch = dict[str, Tensor]


def make_inputs(model: Any, rows: int, *, has_pictures: bool) -> Iterator[Batch]:
    """Yield batches, one of which a model should take.

    Args:
        model: The model.
        rows: Rows of a batch.
        has_pictures: Whether batches have pictures, if the model takes any.
    """
    takes = inspect.signature(model.forward).parameters
    for pictures in _make_pictures(model, rows, takes) if has_pictures else [{}]:
        if "input_values" in takes and "input_ids" not in takes:
            sound = torch.randn(rows, 4000, generator=torch.Generator().manual_seed(0))
            yield _complete(model, takes, {"input_values": sound}, _make_ids(model, rows, 0))
            continue
        if "input_features" in takes and "input_ids" not in takes:
            bins = _find_number(
                model.config,
                "feature_projection_input_dim",
                "num_mel_bins",
                "input_feat_per_channel",
                default=80,
            )
            frames = 2 * _find_number(model.config, "max_source_positions", default=32)
            sound = torch.randn(rows, bins, frames, generator=torch.Generator().manual_seed(0))
            for features in (sound, sound.transpose(1, 2)):
                yield _complete(
                    model, takes, {"input_features": features}, _make_ids(model, rows, 0)
                )
            continue
        if "input_ids" not in takes:
            yield (
                _complete(model, takes, pictures, _make_ids(model, rows, 0))
                if pictures
                else pictures
            )
            continue
        for count in _count_tokens(model, pictures, rows) if pictures else [0]:
            text = _make_ids(model, rows, count)
            yield _complete(model, takes, {"input_ids": text, **pictures}, text)


def _make_ids(model: Any, rows: int, pictures: int) -> Tensor:
    """Return ids of words; the first word is followed by tokens of a picture."""
    ids = torch.randint(
        FIRST_WORD, WORDS, (rows, CONTEXT + pictures), generator=torch.Generator().manual_seed(0)
    )
    config = model.config
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int):
        ids[:, -1] = end
    if pictures:
        ids[:, 1 : 1 + pictures] = _find_picture_token(config)
    return ids


def _find_picture_token(config: Any) -> int:
    names = ("image_token_id", "image_token_index", "img_context_token_id", "video_token_index")
    return next(
        (value for name in names if isinstance(value := getattr(config, name, None), int)),
        FIRST_WORD - 1,
    )


def _find_number(config: Any, *names: str, default: int) -> int:
    """Return the first number with one of some names in a configuration, or in its configuration of pictures."""
    parts = [value for key, value in vars(config).items() if hasattr(value, "model_type")]
    parts.sort(key=lambda part: "vi" not in part.model_type)
    for part in (*parts, config):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def _make_pictures(model: Any, rows: int, takes: Mapping[str, Any]) -> Iterator[Batch]:
    """Yield pictures in the forms in which models take them."""
    draw = torch.Generator().manual_seed(0)
    config = model.config
    channels = _find_number(config, "num_channels", "in_channels", "in_chans", default=3)
    size = _find_number(config, "image_size", "input_size", default=32)
    patch = _find_number(config, "patch_size", "spatial_patch_size", default=8)
    frames = _find_number(config, "patch_temporal", "temporal_patch_size", default=1)
    count = _SIDE * _SIDE
    picture = torch.randn(rows, channels, size, size, generator=draw)
    sides = torch.full((rows, 2), _SIDE)
    grid = torch.tensor([[1, _SIDE, _SIDE]] * rows)
    patches = torch.randn(rows, count, channels * frames * patch * patch, generator=draw)
    if "flattened_patches" in takes:
        places = (
            torch.cartesian_prod(torch.arange(_SIDE), torch.arange(_SIDE))
            .float()
            .expand(rows, count, 2)
        )
        yield {"flattened_patches": torch.cat((places + 1, patches), -1)}
        return
    if "pixel_values" not in takes:
        return
    if "image_grid_thw" in takes:
        flat = patches.flatten(0, 1)
        squares = flat.unflatten(-1, (channels * frames, patch, patch))
        merged = (
            {"image_merge_sizes": torch.full((rows,), 2)} if "image_merge_sizes" in takes else {}
        )
        for pixels in (
            flat,
            squares,
            squares[None].transpose(0, 1),
            flat.unflatten(-1, (-1, channels)).flatten(0, 1),
        ):
            yield {"pixel_values": pixels, "image_grid_thw": grid, **merged}
    if "image_grid_hw" in takes:
        yield {"pixel_values": patches.flatten(0, 1), "image_grid_hw": sides}
    if "image_position_ids" in takes:
        places = torch.cartesian_prod(torch.arange(_SIDE), torch.arange(_SIDE)).expand(
            rows, count, 2
        )
        yield {"pixel_values": patches, "image_position_ids": places}
    if "spatial_shapes" in takes:
        yield {
            "pixel_values": patches,
            "spatial_shapes": sides,
            "pixel_attention_mask": torch.ones(rows, count, dtype=torch.long),
        }
    if "target_sizes" in takes:
        flat = (
            patches.unflatten(-1, (channels, frames, patch, patch))[:, :, :, 0]
            .permute(0, 2, 3, 1, 4)
            .flatten(-2)
        )
        yield {"pixel_values": flat.flatten(0, 0), "target_sizes": sides}
    if "aspect_ratio_ids" in takes:
        tiles = _find_number(config, "max_num_tiles", default=4)
        yield {
            "pixel_values": picture[:, None, None].repeat(1, 1, tiles, 1, 1, 1),
            "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(rows, 1, tiles, dtype=torch.long),
            "cross_attention_mask": torch.ones(rows, CONTEXT, 1, tiles, dtype=torch.long),
        }
    more = {"high_res_pixel_values": picture} if "high_res_pixel_values" in takes else {}
    sizes = {"image_sizes": torch.full((rows, 2), size)} if "image_sizes" in takes else {}
    if "tile_fine_mask" in takes:
        more["pixel_attention_mask"] = torch.ones(rows, 1, dtype=torch.bool)
    for pixels in (picture, picture[:, None], picture[:, None].repeat(1, 2, 1, 1, 1), patches):
        if sizes:
            yield {"pixel_values": pixels, **sizes, **more}
        yield {"pixel_values": pixels, **more}


def _count_tokens(model: Any, pictures: Batch, rows: int) -> Iterator[int]:
    """Yield numbers of tokens that may represent a picture in the text, the likeliest first."""
    counts = []
    for owner in (model, getattr(model, "model", None)):
        compute = getattr(owner, "get_image_features", None)
        if compute is not None:
            given = inspect.signature(compute).parameters
            known = {
                name: value for name, value in pictures.items() if name in given or "args" in given
            }
            try:
                with torch.no_grad():
                    found = compute(**known)
            # The other owner, or a number of the configuration, may do.
            except Exception:  # noqa: BLE001
                continue
            for part in (
                getattr(found, "pooler_output", found),
                getattr(found, "last_hidden_state", None),
            ):
                numbers = sum(tensor.numel() for _, tensor in find_tensors(part))
                counts.append(numbers // model.get_input_embeddings().weight.shape[1] // rows)
            break
    names = (
        "image_seq_length",
        "mm_tokens_per_image",
        "num_query_tokens",
        "image_seq_len",
        "num_image_tokens",
    )
    counts += [_find_number(model.config, name, default=0) for name in names]
    yield from dict.fromkeys(count for count in counts if 0 < count < 1000)
    yield 0


def _complete(model: Any, takes: Mapping[str, Any], inputs: Batch, ids: Tensor) -> Batch:
    """Return a batch with all other inputs that a model requires."""
    is_picture = ids == _find_picture_token(model.config)
    length = ids.shape[1]
    corners = torch.arange(4 * length).view(1, length, 4) % 32
    known = {
        "mm_token_type_ids": is_picture.long(),
        "image_embeds_position_mask": is_picture,
        "image_attention_mask": torch.ones(*ids.shape, 1, dtype=torch.long),
        "qformer_input_ids": ids,
        "protein_input_ids": ids,
        "protein_attention_mask": torch.ones_like(ids),
        "bbox": corners.sort(dim=-1).values.expand(len(ids), -1, -1),
    }
    if "pixel_values" in inputs:
        known["token_type_ids"] = is_picture.long()
    if "decoder_input_ids" in takes:
        known["decoder_input_ids"] = _make_ids(model, len(ids), 0).flip(1)
    return inputs | {
        name: value for name, value in known.items() if name in takes and name not in inputs
    }
