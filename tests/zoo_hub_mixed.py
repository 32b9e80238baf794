"""Small configurations of KerasHub's backbones of several inputs: images with text, audio, diffusion, prompts."""

import keras_hub
from keras_hub.src.models.vae.vae_backbone import VAEBackbone  # a backbone without a public name
from zoo import Entry

models, layers = keras_hub.models, keras_hub.layers
_TOWER = {"hidden_dim": 32, "num_layers": 3, "num_heads": 4, "intermediate_dim": 64}
_IMAGES = {**_TOWER, "patch_size": 8, "image_shape": (32, 32, 3)}
_TEXT = {**_TOWER, "vocabulary_size": 64, "embedding_dim": 32}


def _clip():
    return models.CLIPBackbone(models.CLIPVisionEncoder(**_IMAGES), models.CLIPTextEncoder(**_TEXT), 16)


def _metaclip():
    return models.MetaCLIP2Backbone(models.MetaCLIP2VisionEncoder(**_IMAGES), models.MetaCLIP2TextEncoder(**_TEXT), 16)


def _siglip():
    return models.SigLIPBackbone(models.SigLIPVisionEncoder(**_IMAGES), models.SigLIPTextEncoder(**_TEXT))


def _pali_gemma():
    return models.PaliGemmaBackbone(
        vocabulary_size=64,
        image_size=16,
        num_layers=4,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=32,
        intermediate_dim=64,
        head_dim=8,
        vit_patch_size=4,
        vit_num_heads=4,
        vit_hidden_dim=32,
        vit_num_layers=3,
        vit_intermediate_dim=64,
    )


def _blip2():
    return models.BLIP2Backbone(
        models.BLIP2VisionEncoder(
            image_size=16,
            patch_size=4,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            intermediate_dim=64,
            use_patch_bias=True,
            use_class_token=True,
            use_mha_bias=True,
            use_mlp_bias=True,
            dropout_rate=0.1,
            layer_norm_epsilon=1e-6,
            initializer_range=0.02,
        ),
        models.BLIP2QFormer(
            num_query_tokens=4,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            intermediate_dim=64,
            vision_dim=32,
            cross_attention_frequency=1,
            dropout=0.1,
            layer_norm_epsilon=1e-6,
        ),
        models.BLIP2CustomOPT(
            vocabulary_size=64,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            intermediate_dim=64,
            num_query_tokens=4,
            qformer_hidden_dim=32,
        ),
    )


def _vae(channels):
    return VAEBackbone([32] * 4, [1] * 4, [32] * 4, [1] * 4, sampler_method="mode", latent_channels=channels)


def _stable_diffusion():
    clip = {"vocabulary_size": 64, "num_layers": 2, "intermediate_output_index": -2}
    return models.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=32,
        mmdit_num_layers=3,
        mmdit_num_heads=2,
        mmdit_position_size=16,
        mmdit_qk_norm=None,
        mmdit_dual_attention_indices=None,
        vae=_vae(16),
        clip_l=models.CLIPTextEncoder(embedding_dim=32, hidden_dim=32, num_heads=2, intermediate_dim=64, name="clip_l", **clip),
        clip_g=models.CLIPTextEncoder(
            embedding_dim=64, hidden_dim=64, num_heads=2, intermediate_dim=128, name="clip_g", **clip
        ),
        image_shape=(64, 64, 3),
    )


def _flux():
    return models.FluxBackbone(
        input_channels=16,
        hidden_size=64,
        mlp_ratio=2.0,
        num_heads=4,
        depth=3,
        depth_single_blocks=3,
        axes_dim=[4, 6, 6],
        theta=10_000,
        use_bias=True,
        guidance_embed=True,
        image_shape=(32, 16),
        text_shape=(16, 16),
        image_ids_shape=(32, 3),
        text_ids_shape=(16, 3),
        y_shape=(16,),
    )


def _sam():
    return models.SAMBackbone(
        models.ViTDetBackbone(
            32, 4, 64, 4, [1, 3], image_shape=(64, 64, 3), patch_size=16, num_output_channels=16, window_size=2
        ),
        layers.SAMPromptEncoder(hidden_size=16, image_embedding_size=(4, 4), input_image_size=(64, 64), mask_in_channels=16),
        layers.SAMMaskDecoder(
            num_layers=2,
            hidden_size=16,
            intermediate_dim=32,
            num_heads=4,
            embedding_dim=16,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=16,
        ),
    )


def _sam3():
    image = {"image_shape": (56, 56, 3), "patch_size": 14}
    tower = {"hidden_dim": 32, "num_heads": 2, "intermediate_dim": 64}
    return models.SAM3PromptableConceptBackbone(
        vision_encoder=layers.SAM3VisionEncoder(
            **image,
            **tower,
            num_layers=2,
            fpn_hidden_dim=32,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(56, 56, 3),
            window_size=2,
            global_attn_indexes=[1, 2],
        ),
        text_encoder=layers.SAM3TextEncoder(vocabulary_size=64, embedding_dim=32, num_layers=2, **tower),
        geometry_encoder=layers.SAM3GeometryEncoder(num_layers=2, roi_size=7, **tower),
        detr_encoder=layers.SAM3DetrEncoder(num_layers=2, **tower),
        detr_decoder=layers.SAM3DetrDecoder(**image, **tower, num_layers=2, num_queries=8),
        mask_decoder=layers.SAM3MaskDecoder(num_upsampling_stages=3, hidden_dim=32, num_heads=2),
    )


def _moonshine():
    return models.MoonshineBackbone(
        vocabulary_size=64,
        filter_dim=32,
        encoder_num_layers=3,
        decoder_num_layers=3,
        hidden_dim=32,
        intermediate_dim=64,
        encoder_num_heads=4,
        decoder_num_heads=4,
    )


def _whisper():
    return models.WhisperBackbone(
        vocabulary_size=64,
        num_mels=16,
        dropout=0.1,
        max_encoder_sequence_length=64,
        max_decoder_sequence_length=32,
        **_TOWER,
    )


_TEXT_IMAGE, _AUDIO, _DIFFUSION = "KerasHub, images with text or prompts", "KerasHub, audio", "KerasHub, diffusion"
_SAM_SHAPES = {"points": (1, 2), "labels": (1,), "boxes": (1, 2, 2), "masks": (0, 64, 64, 1)}
_ENTRIES = [
    Entry("CLIPBackbone", _TEXT_IMAGE, _clip, 8),
    Entry("MetaCLIP2Backbone", _TEXT_IMAGE, _metaclip, 8),
    Entry("SigLIPBackbone", _TEXT_IMAGE, _siglip, 8, length=64),
    Entry("PaliGemmaBackbone", _TEXT_IMAGE, _pali_gemma, 8),
    Entry("BLIP2Backbone", _TEXT_IMAGE, _blip2, 8),
    Entry("SAMBackbone", _TEXT_IMAGE, _sam, 4, shapes=_SAM_SHAPES, vocabulary=2),
    Entry("SAM3PromptableConceptBackbone", _TEXT_IMAGE, _sam3, 2, shapes={"boxes": (1, 5), "box_labels": (1,)}, vocabulary=2),
    Entry(
        "MoonshineBackbone", _AUDIO, _moonshine, 8, shapes={"encoder_input_values": (2048, 1), "encoder_padding_mask": (2048,)}
    ),
    Entry("WhisperBackbone", _AUDIO, _whisper, 8, shapes={"encoder_features": (64, 16)}),
    Entry("StableDiffusion3Backbone", _DIFFUSION, _stable_diffusion, 4),
    Entry("FluxBackbone", _DIFFUSION, _flux, 8),
    Entry("VAEBackbone", _DIFFUSION, lambda: _vae(16), 4, length=32),
]
MIXED = {entry.name: entry for entry in _ENTRIES}
