"""Small configurations of KerasHub's image and video backbones."""

import keras_hub
from zoo import Entry

models = keras_hub.models
_SHAPE = {"image_shape": (32, 32, 3)}
_WIDE = {"image_shape": (64, 64, 3)}
_VIT = {"patch_size": 4, "num_layers": 6, "num_heads": 4, "hidden_dim": 32}


def _resnet(**shape):
    return models.ResNetBackbone(
        input_conv_filters=[16],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 16, 32, 32],
        stackwise_num_blocks=[2, 2, 2, 2],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="bottleneck_block",
        **shape,
    )


def _basnet():
    encoder = models.ResNetBackbone(
        input_conv_filters=[16],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128, 256, 512],
        stackwise_num_blocks=[2, 2, 2, 2],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        **_WIDE,
    )
    return models.BASNetBackbone(encoder, num_classes=1, projection_filters=8, **_WIDE)


def _deeplab():
    return models.DeepLabV3Backbone(
        _resnet(**_WIDE),
        spatial_pyramid_pooling_key="P5",
        low_level_feature_key="P2",
        upsampling_size=8,
        dilation_rates=[6, 12, 18],
        projection_filters=8,
        **_WIDE,
    )


def _depth_anything():
    encoder = models.DINOV2Backbone(
        **{**_VIT, "num_layers": 4}, intermediate_dim=64, position_embedding_shape=(32, 32, 3), **_SHAPE
    )
    return models.DepthAnythingBackbone(
        encoder,
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[8, 16, 24, 32],
        fusion_hidden_dim=16,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )


def _efficientnet():
    return models.EfficientNetBackbone(
        stackwise_width_coefficients=[1.0] * 3,
        stackwise_depth_coefficients=[1.0] * 3,
        stackwise_kernel_sizes=[3, 3, 5],
        stackwise_num_repeats=[1, 2, 3],
        stackwise_input_filters=[16, 16, 24],
        stackwise_output_filters=[16, 24, 32],
        stackwise_expansion_ratios=[1, 4, 4],
        stackwise_squeeze_and_excite_ratios=[0.0, 0.25, 0.25],
        stackwise_strides=[1, 2, 2],
        stackwise_block_types=["fused", "unfused", "unfused"],
        stackwise_force_input_filters=[0] * 3,
        stackwise_nores_option=[False] * 3,
        num_features=64,
        input_shape=(32, 32, 3),
    )


def _hgnet(features=None, **shape):
    return models.HGNetV2Backbone(
        depths=[1, 1, 2, 1],
        embedding_size=16,
        hidden_sizes=[32, 48, 64, 96],
        stem_channels=[3, 8, 16],
        hidden_act="relu",
        use_learnable_affine_block=True,
        stackwise_stage_filters=[
            [16, 16, 32, 1, 3, 3],
            [32, 16, 48, 1, 3, 3],
            [48, 24, 64, 2, 3, 5],
            [64, 32, 96, 1, 3, 5],
        ],
        apply_downsample=[False, True, True, True],
        use_lightweight_conv_block=[False, False, True, True],
        out_features=features,
        **shape,
    )


def _dfine():
    return models.DFineBackbone(
        _hgnet(["stage3", "stage4"], **_WIDE),
        decoder_in_channels=[32, 32],
        encoder_hidden_dim=32,
        num_labels=4,
        num_denoising=0,
        learn_initial_query=False,
        num_queries=12,
        anchor_image_size=(64, 64),
        feat_strides=[16, 32],
        num_feature_levels=2,
        hidden_dim=32,
        encoder_in_channels=[64, 96],
        encode_proj_layers=[1],
        num_attention_heads=4,
        encoder_ffn_dim=64,
        num_encoder_layers=1,
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        decoder_n_points=[4, 4],
        lqe_hidden_dim=16,
        num_lqe_layers=2,
        out_features=["stage3", "stage4"],
        seed=0,
        **_WIDE,
    )


def _mit(**shape):
    return models.MiTBackbone(
        layerwise_depths=[2, 2, 2, 2],
        num_layers=4,
        layerwise_num_heads=[1, 2, 2, 4],
        layerwise_sr_ratios=[8, 4, 2, 1],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3, 3, 3],
        layerwise_strides=[4, 2, 2, 2],
        hidden_dims=[16, 24, 32, 48],
        **shape,
    )


def _mobilenet():
    return models.MobileNetBackbone(
        stackwise_expansion=[[40, 56], [64, 144, 144]],
        stackwise_num_blocks=[2, 3],
        stackwise_num_filters=[[16, 16], [24, 24, 24]],
        stackwise_kernel_size=[[3, 3], [5, 5, 5]],
        stackwise_num_strides=[[2, 1], [2, 1, 1]],
        stackwise_se_ratio=[[None, None], [0.25, 0.25, 0.25]],
        stackwise_activation=[["relu", "relu"], ["hard_swish"] * 3],
        stackwise_padding=[[1, 1], [2, 2, 2]],
        output_num_filters=64,
        depthwise_filters=8,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=32,
        squeeze_and_excite=0.5,
        **_SHAPE,
    )


def _mobilenet_v5():
    rows = {
        "block_types": ("er", "uir"),
        "num_filters": (24, 48),
        "act_layers": ("relu", "relu"),
        "exp_ratios": (4.0, 6.0),
        "se_ratios": (0.0, 0.0),
        "dw_kernel_sizes": (0, 5),
        "dw_start_kernel_sizes": (0, 0),
        "dw_end_kernel_sizes": (0, 0),
        "exp_kernel_sizes": (3, 0),
        "pw_kernel_sizes": (1, 0),
        "num_heads": (0, 0),
        "key_dims": (0, 0),
        "value_dims": (0, 0),
        "kv_strides": (0, 0),
        "use_cpe": (False, False),
    }
    return models.MobileNetV5Backbone(
        **{f"stackwise_{name}": [[first], [then, then]] for name, (first, then) in rows.items()},
        stackwise_num_blocks=[1, 2],
        stackwise_strides=[[2], [2, 1]],
        use_msfa=False,
        **_SHAPE,
    )


_BUILDERS = {
    "BASNet": _basnet,
    "CSPNet": lambda: models.CSPNetBackbone(
        16, 3, 1, [1, 2, 2], [1, 2, 2], [16, 32, 48], block_type="dark_block", stage_type="dark", **_SHAPE
    ),
    "DFine": _dfine,
    "DINOV2": lambda: models.DINOV2Backbone(**_VIT, intermediate_dim=64, position_embedding_shape=(32, 32, 3), **_SHAPE),
    "DINOV3": lambda: models.DINOV3Backbone(**_VIT, intermediate_dim=64, **_SHAPE),
    "DeepLabV3": _deeplab,
    "DeiT": lambda: models.DeiTBackbone(**_VIT, intermediate_dim=64, dropout_rate=0.1, **_SHAPE),
    "DenseNet": lambda: models.DenseNetBackbone([2, 4, 3], growth_rate=8, **_SHAPE),
    "DepthAnything": _depth_anything,
    "EfficientNet": _efficientnet,
    "HGNetV2": lambda: _hgnet(**_SHAPE),
    "MiT": lambda: _mit(**_WIDE),
    "MobileNet": _mobilenet,
    "MobileNetV5": _mobilenet_v5,
    "PARSeq": lambda: models.PARSeqBackbone(
        models.ViTBackbone(**_VIT, mlp_dim=64, use_class_token=False, **_SHAPE),
        vocabulary_size=64,
        max_label_length=31,
        decoder_hidden_dim=32,
        num_decoder_layers=2,
        num_decoder_heads=4,
        decoder_mlp_dim=64,
    ),
    "ResNet": lambda: _resnet(**_SHAPE),
    "RetinaNet": lambda: models.RetinaNetBackbone(_resnet(**_WIDE), 3, 5, True, **_WIDE),
    "SegFormer": lambda: models.SegFormerBackbone(_mit(**_WIDE), projection_filters=16),
    "SwinTransformer": lambda: models.SwinTransformerBackbone((32, 32, 3), 16, [2, 2], [2, 4], 4, patch_size=2),
    "VGG": lambda: models.VGGBackbone([2, 2, 3], [16, 32, 48], **_SHAPE),
    "ViT": lambda: models.ViTBackbone(**_VIT, mlp_dim=64, dropout_rate=0.1, **_SHAPE),
    "ViTDet": lambda: models.ViTDetBackbone(
        32, 6, 64, 4, [2, 5], patch_size=4, num_output_channels=16, window_size=4, **_SHAPE
    ),
    "VideoPrism": lambda: models.VideoPrismBackbone(4, 8, 32, 64, 4, 3, 2, 0, **_SHAPE),
    "Xception": lambda: models.XceptionBackbone([[16, 32], [32, 48], [48, 48]], [True, True, False], **_SHAPE),
}
IMAGE = {f"{name}Backbone": Entry(f"{name}Backbone", "KerasHub, images", build, batch=8) for name, build in _BUILDERS.items()}
